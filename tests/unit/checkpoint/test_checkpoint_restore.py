# SPDX-License-Identifier: Apache-2.0
"""Saves of one world restored by another, and the way back to an older checkpoint.

Faked: ranks are threads; failures of the store. Real: stores, journal, saver and restore.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_scenario import (
    SPECS,
    Fault,
    ToyRun,
    WatchedStore,
    assert_restored,
    newest_commit,
    random_state,
    restore_member,
    restore_world,
    wanted_ranges,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.checkpoint import objects
from raydist.checkpoint.group import Group
from raydist.checkpoint.layout import journal_key, manifest_key, part_key
from raydist.checkpoint.manifest import Manifest
from raydist.checkpoint.ranges import DTYPE_BYTES, TensorSpec, WantedRange
from raydist.checkpoint.restore import Restored, restore
from raydist.errors import CheckpointError, DataError, StorageError
from raydist.storage.local import LocalStore
from raydist.testing.memory_store import MemoryStore
from raydist.testing.single_rank import SingleRank
from raydist.testing.thread_group import ThreadGroup

SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@settings(deadline=None, database=None, max_examples=60)
@given(
    shapes=st.lists(st.tuples(SHAPES, st.sampled_from(sorted(DTYPE_BYTES))), max_size=6),
    saved_by=st.integers(1, 5),
    restored_by=st.integers(1, 5),
    block_bytes=st.sampled_from([8, 100, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_restore_under_any_world_gives_every_rank_exactly_its_bytes(
    shapes: list[tuple[tuple[int, ...], str]],
    saved_by: int,
    restored_by: int,
    block_bytes: int,
    seed: int,
) -> None:
    specs = [
        TensorSpec(key=f"master/t{n}", shape=shape, dtype=dtype)
        for n, (shape, dtype) in enumerate(shapes)
    ]
    state = random_state(seed, specs)
    store = MemoryStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "_MIN_BLOCK_BYTES", block_bytes)
        outcomes = ToyRun(store, world_size=saved_by).save(state, 4)
    assert all(outcome.committed for outcome in outcomes)
    found = restore_world(store, restored_by, specs)
    assert_restored(found, state)
    for restored in found:
        assert restored.manifest.progress.step == 4
        assert restored.manifest.world_size == saved_by
        assert restored.manifest.scalars == {"adam_step": 4.0}
        assert restored.skipped == ()


@pytest.mark.parametrize(("saved_by", "restored_by"), [(1, 1), (4, 4), (4, 3), (3, 5), (5, 1)])
def test_restore_reads_little_more_than_the_state_and_once(
    monkeypatch: pytest.MonkeyPatch, saved_by: int, restored_by: int
) -> None:
    monkeypatch.setattr(objects, "_MIN_BLOCK_BYTES", 512)
    specs = [TensorSpec(key=f"t{n}", shape=(200, 100), dtype="F32") for n in range(4)]
    state = random_state(1, specs)
    state_bytes = sum(len(raw) for raw in state.values())
    store = WatchedStore(MemoryStore())
    ToyRun(store, world_size=saved_by).save(state, 1)
    store.requests.clear()
    found = restore_world(store, restored_by, specs)
    assert_restored(found, state)
    of_objects = [r for r in store.requests if r.key.endswith(".safetensors")]
    num_read = sum(r.num_bytes for r in of_objects)
    assert num_read == sum(restored.bytes_read for restored in found)
    assert state_bytes <= num_read < 1.1 * state_bytes
    # A slice of each tensor lies in at most two objects more than its own share of them.
    assert len(of_objects) <= len(specs) * (saved_by + restored_by)
    manifests = [r for r in store.requests if r.key.endswith("manifest.json")]
    assert len(manifests) == 1


def test_restore_of_a_rank_without_a_share_reads_nothing() -> None:
    state = random_state(1, [TensorSpec(key="t", shape=(2,), dtype="F32")])
    store = MemoryStore()
    ToyRun(store, world_size=2).save(state, 1)
    found = restore_world(store, 4, list(state))
    assert [restored.bytes_read > 0 for restored in found] == [True, True, False, False]


def test_restore_without_a_commit_is_none_on_every_rank() -> None:
    store = MemoryStore()
    outcomes = ThreadGroup(3).outcomes(lambda member: restore_member(store, member, SPECS))
    assert outcomes == [None, None, None]


@pytest.mark.parametrize(
    "changed",
    [
        replace(SPECS[2], shape=(3,)),
        replace(SPECS[2], dtype="F16"),
        replace(SPECS[2], key="master/other.weight"),
    ],
)
def test_restore_into_another_model_is_an_error_naming_the_tensor_on_every_rank(
    changed: TensorSpec,
) -> None:
    store = MemoryStore()
    run = ToyRun(store)
    run.save(random_state(1), 1)
    run.save(random_state(2), 2)
    specs = [changed if spec is SPECS[2] else spec for spec in SPECS]
    outcomes = ThreadGroup(3).outcomes(lambda member: restore_member(store, member, specs))
    for outcome in outcomes:
        assert isinstance(outcome, CheckpointError)
        assert changed.key in str(outcome)
        assert "step 2" in str(outcome)
        assert "--name" in str(outcome)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (DataError(problem="no such parameter"), "no such parameter"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_restore_that_fails_on_one_rank_only_raises_on_all_with_its_rank(
    error: Exception, text: str
) -> None:
    store = MemoryStore()
    ToyRun(store).save(random_state(1), 1)

    def work(member: Group) -> Restored | None:
        def wanted(manifest: Manifest) -> list[WantedRange]:
            if member.rank == 2:
                raise error
            return wanted_ranges(SPECS, rank=member.rank, world_size=3)

        commit = newest_commit(store) if member.rank == 0 else None
        return restore(store=store, group=member, commit=commit, wanted=wanted)

    for outcome in ThreadGroup(3).outcomes(work):
        assert isinstance(outcome, CheckpointError)
        assert f"rank 2: {text}" in str(outcome)


def delete_part(store: MemoryStore, step: int) -> str:
    key = part_key(step, 1, 1, 2)
    store.delete(key)
    return key


def shorten_part(store: MemoryStore, step: int) -> str:
    key = part_key(step, 1, 0, 2)
    store.put(key, store.get(key)[:-3])
    return key


def flip_part(store: MemoryStore, step: int) -> str:
    key = part_key(step, 1, 1, 2)
    raw = bytearray(store.get(key))
    raw[len(raw) // 2] ^= 4
    store.put(key, raw)
    return key


def delete_manifest(store: MemoryStore, step: int) -> str:
    key = manifest_key(step, 1)
    store.delete(key)
    return key


def flip_manifest(store: MemoryStore, step: int) -> str:
    key = manifest_key(step, 1)
    store.put(key, store.get(key).replace(b'"adam_step":', b'"adam_stop":'))
    return key


DAMAGES = [delete_part, shorten_part, flip_part, delete_manifest, flip_manifest]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_restore_with_a_damaged_newest_goes_back_and_says_what_is_lost(
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[MemoryStore, int], str],
    world_size: int,
) -> None:
    store = MemoryStore()
    run = ToyRun(store)
    states = {step: random_state(step) for step in (100, 200, 300)}
    for step, state in states.items():
        run.save(state, step)
    key = damage(store, 300)
    with caplog.at_level(logging.WARNING):
        found = restore_world(store, world_size)
    assert_restored(found, states[200])
    for restored in found:
        assert restored.manifest.progress.step == 200
        (reason,) = restored.skipped
        assert reason.startswith("step 300: ")
        assert key in reason
    (record,) = caplog.records
    assert "going back to step 200, 100 steps lost" in record.getMessage()
    assert key in record.getMessage()


def test_restore_with_two_damaged_goes_back_two_over_attempts_and_abandoned_saves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    first = ToyRun(store)
    first.save(random_state(10), 10)
    first.save(random_state(20), 20)
    first.save(random_state(25), 25, errors={1: CheckpointError(problem="not finite")})
    second = ToyRun(store, world_size=3)
    second.save(random_state(30), 30)
    delete_part(store, 20)
    store.delete(part_key(30, 2, 2, 3))
    with caplog.at_level(logging.WARNING):
        found = restore_world(store, 2)
    assert_restored(found, random_state(10))
    assert [reason.split(":")[0] for reason in found[1].skipped] == ["step 30", "step 20"]
    assert "going back to step 10, 20 steps lost" in caplog.messages[-1]


def test_restore_with_nothing_left_raises_every_reason_on_every_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    run = ToyRun(store)
    run.save(random_state(1), 1)
    run.save(random_state(2), 2)
    keys = [delete_part(store, 1), delete_manifest(store, 2)]
    for outcome in ThreadGroup(3).outcomes(lambda m: restore_member(store, m, SPECS)):
        assert isinstance(outcome, CheckpointError)
        assert all(key in str(outcome) for key in keys)
        assert "--name" in str(outcome)
    assert "going back to step 0" not in caplog.text


def test_restore_while_the_store_fails_one_rank_is_an_error_and_goes_nowhere() -> None:
    inner = MemoryStore()
    run = ToyRun(inner)
    run.save(random_state(1), 1)
    run.save(random_state(2), 2)
    bad = WatchedStore(inner, Fault(operation="get", part=".safetensors"))

    def work(member: Group) -> Restored | None:
        return restore_member(bad if member.rank == 1 else inner, member, SPECS)

    for outcome in ThreadGroup(3).outcomes(work):
        assert isinstance(outcome, CheckpointError)
        assert "rank 1: injected: get" in str(outcome)


@pytest.mark.parametrize("part", ["journal/", "manifest.json"])
def test_restore_while_the_store_fails_rank_0_going_back_raises_on_every_rank(part: str) -> None:
    inner = MemoryStore()
    run = ToyRun(inner)
    run.save(random_state(1), 1)
    run.save(random_state(2), 2)
    commit = newest_commit(inner)
    delete_part(inner, 2)
    store = WatchedStore(inner)

    def work(member: Group) -> Restored | None:
        def wanted(manifest: Manifest) -> list[WantedRange]:
            if member.rank == 0:  # the manifest of step 2 is there; what comes after fails
                store.faults.append(Fault(operation="get", part=part))
            return wanted_ranges(SPECS, rank=member.rank, world_size=3)

        first = commit if member.rank == 0 else None
        return restore(store=store, group=member, commit=first, wanted=wanted)

    for outcome in ThreadGroup(3).outcomes(work):
        assert isinstance(outcome, CheckpointError)
        assert "injected" in str(outcome)


def test_restore_with_an_unreadable_entry_on_the_way_back_raises_on_every_rank() -> None:
    store = MemoryStore()
    run = ToyRun(store)
    for step in (1, 2, 3):
        run.save(random_state(step), step)
    delete_part(store, 3)
    store.put(journal_key(3), b"garbage")
    for outcome in ThreadGroup(3).outcomes(lambda m: restore_member(store, m, SPECS)):
        assert isinstance(outcome, CheckpointError)
        assert journal_key(3) in str(outcome)


def test_restore_with_one_rank_and_no_group_works(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    state = random_state(5)
    ToyRun(store, world_size=3).save(state, 5)
    restored = restore_member(store, SingleRank(), SPECS)
    assert restored is not None
    assert_restored([restored], state)


def test_restore_of_a_commit_the_store_cannot_serve_is_a_storage_error_at_the_start() -> None:
    inner = MemoryStore()
    ToyRun(inner).save(random_state(1), 1)
    store = WatchedStore(inner, Fault(operation="get", part="journal/0"))
    with pytest.raises(StorageError, match="injected"):
        restore_member(store, SingleRank(), SPECS)
