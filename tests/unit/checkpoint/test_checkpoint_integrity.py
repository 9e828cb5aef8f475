# SPDX-License-Identifier: Apache-2.0
"""Thousands of seeded damages to what is stored: what comes back is right, or nothing does.

Faked: ranks are threads; the damage. Real: MemoryStore and everything in raydist.checkpoint.
"""

from __future__ import annotations

import logging
import random

import pytest
from checkpoint_scenario import (
    SPECS,
    ToyRun,
    assert_restored,
    random_state,
    restore_member,
)

from raydist.checkpoint.inspect import verify_checkpoint
from raydist.checkpoint.layout import manifest_key
from raydist.checkpoint.ranges import TensorSpec
from raydist.checkpoint.restore import Restored
from raydist.errors import CheckpointError
from raydist.testing.memory_store import MemoryStore
from raydist.testing.single_rank import SingleRank
from raydist.testing.thread_group import ThreadGroup

STATES = {step: random_state(step) for step in (10, 20)}


@pytest.fixture(scope="module")
def committed() -> MemoryStore:
    """Two checkpoints by two ranks; no test may change it."""
    store = MemoryStore()
    run = ToyRun(store)
    for step, state in STATES.items():
        run.save(state, step)
    return store


def copy_of(store: MemoryStore) -> MemoryStore:
    copy = MemoryStore()
    for key, _ in store.list(""):
        copy.put(key, store.get(key))
    return copy


def damage(store: MemoryStore, key: str, source: random.Random) -> str:
    """Alter one object for good; returns how."""
    raw = store.get(key)
    how = source.choice(["flip", "overwrite", "truncate", "delete", "swap", "zero"])
    at = source.randrange(len(raw))
    if how == "flip":
        raw = raw[:at] + bytes([raw[at] ^ (1 << source.randrange(8))]) + raw[at + 1 :]
    elif how == "overwrite":
        end = min(len(raw), at + source.randint(1, 40))
        raw = raw[:at] + bytes(255 - byte for byte in raw[at:end]) + raw[end:]
    elif how == "truncate":
        raw = raw[:at]
    elif how == "zero":
        raw = bytes(len(raw))
    elif how == "swap":
        others = [other for other, _ in store.list("checkpoints/") if store.get(other) != raw]
        raw = store.get(source.choice(others))
    if how == "delete":
        store.delete(key)
    else:
        store.put(key, raw)
    return f"{how} {key} at {at}"


def restored_or_error(store: MemoryStore, world_size: int) -> list[Restored] | CheckpointError:
    """All ranks' restores, or the error that all of them have."""
    outcomes = ThreadGroup(world_size).outcomes(lambda m: restore_member(store, m, SPECS))
    if isinstance(outcomes[0], CheckpointError):
        assert {str(outcome) for outcome in outcomes} == {str(outcomes[0])}
        return outcomes[0]
    found = [outcome for outcome in outcomes if isinstance(outcome, Restored)]
    assert len(found) == world_size, outcomes
    return found


@pytest.mark.parametrize("block", range(6))
def test_any_damage_to_the_newest_checkpoint_falls_back_with_the_reason(
    caplog: pytest.LogCaptureFixture, committed: MemoryStore, block: int
) -> None:
    caplog.set_level(logging.CRITICAL)
    keys = [key for key, _ in committed.list("checkpoints/step-000000000020/")]
    for seed in range(block * 50, block * 50 + 50):
        source = random.Random(seed)
        store = copy_of(committed)
        key = source.choice(keys)
        how = f"seed {seed}: {damage(store, key, source)}"
        found = restored_or_error(store, source.randint(1, 3))
        assert isinstance(found, list), how
        assert_restored(found, STATES[10])
        for restored in found:
            assert restored.manifest.progress.step == 10, how
            assert [key in reason for reason in restored.skipped] == [True], how


@pytest.mark.parametrize("block", range(4))
def test_any_damage_to_all_checkpoints_raises_and_names_both(
    caplog: pytest.LogCaptureFixture, committed: MemoryStore, block: int
) -> None:
    caplog.set_level(logging.CRITICAL)
    for seed in range(block * 30, block * 30 + 30):
        source = random.Random(seed)
        store = copy_of(committed)
        keys = [
            source.choice([key for key, _ in committed.list(f"checkpoints/step-{step:012d}/")])
            for step in STATES
        ]
        how = f"seed {seed}: {[damage(store, key, source) for key in keys]}"
        error = restored_or_error(store, source.randint(1, 3))
        assert isinstance(error, CheckpointError), how
        assert all(key in str(error) for key in keys), how


def test_bytes_added_to_an_object_change_nothing_that_is_read(committed: MemoryStore) -> None:
    for key, _ in committed.list("checkpoints/step-000000000020/rank"):
        store = copy_of(committed)
        store.put(key, store.get(key) + b"more")
        found = restored_or_error(store, 2)
        assert isinstance(found, list)
        assert_restored(found, STATES[20])


@pytest.mark.parametrize("block", range(4))
def test_any_flipped_byte_of_the_journal_gives_right_bytes_or_one_error(
    caplog: pytest.LogCaptureFixture, committed: MemoryStore, block: int
) -> None:
    caplog.set_level(logging.CRITICAL)
    keys = [key for key, _ in committed.list("journal/")]
    for seed in range(block * 60, block * 60 + 60):
        source = random.Random(seed)
        store = copy_of(committed)
        key = source.choice(keys)
        raw = bytearray(store.get(key))
        at = source.randrange(len(raw))
        raw[at] = source.randrange(256)
        store.put(key, raw)
        try:
            found = restored_or_error(store, 1)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {key} at {at}: {raw!r}") from error
        if isinstance(found, list):
            assert_restored(found, STATES[found[0].manifest.progress.step])


# Ten thousand damages to objects of several blocks

WIDE = (
    TensorSpec(key="master/wide", shape=(90_000,), dtype="F32"),
    TensorSpec(key="buffer/odd", shape=(70_001,), dtype="U8"),
)
WIDE_STATES = {step: random_state(step, WIDE) for step in (10, 20)}


class DamagedStore(MemoryStore):
    """Another store's objects, one of which is altered or gone; nothing is copied."""

    def __init__(self, whole: MemoryStore, key: str, raw: bytes | None) -> None:
        super().__init__()
        self._objects = {**whole._objects, key: raw or b""}
        if raw is None:
            del self._objects[key]


@pytest.fixture(scope="module")
def wide() -> MemoryStore:
    store = MemoryStore()
    run = ToyRun(store)
    for step, state in WIDE_STATES.items():
        run.save(state, step)
    return store


@pytest.mark.parametrize("block", range(10))
def test_no_flip_truncation_or_deletion_goes_undetected(wide: MemoryStore, block: int) -> None:
    logging.disable(logging.CRITICAL)
    try:
        found = [detected(wide, seed) for seed in range(block * 1000, block * 1000 + 1000)]
    finally:
        logging.disable(logging.NOTSET)
    assert found == [""] * 1000


def problems_of(store: MemoryStore) -> list[str]:
    try:
        return verify_checkpoint(store, manifest_key(20, 1))[1]
    except CheckpointError as error:
        return [str(error)]


def detected(wide: MemoryStore, seed: int) -> str:
    """What went unnoticed, or came back wrong; empty when nothing did."""
    source = random.Random(seed)
    key = source.choice([key for key, _ in wide.list("checkpoints/step-000000000020/")])
    raw = bytearray(wide.get(key))
    at = source.randrange(len(raw))
    how = source.choice(["flip", "truncate", "delete"])
    if how == "flip":
        raw[at] ^= 1 << source.randrange(8)
    damaged = None if how == "delete" else bytes(raw if how == "flip" else raw[:at])
    store = DamagedStore(wide, key, damaged)
    if seed % 4 == 0 and not any(key in problem for problem in problems_of(store)):
        return f"seed {seed}: verify did not see {how} of {key} at {at}"
    restored = restore_member(store, SingleRank(), WIDE)
    if restored is None or restored.manifest.progress.step != 10:
        return f"seed {seed}: restore did not see {how} of {key} at {at}"
    if any(restored.buffers[spec.key] != WIDE_STATES[10][spec] for spec in WIDE):
        return f"seed {seed}: restore came back wrong after {how} of {key} at {at}"
    return ""
