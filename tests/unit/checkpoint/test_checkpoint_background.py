# SPDX-License-Identifier: Apache-2.0
"""Saves that go on behind the steps. Faked: ranks are threads, stores that fail or wait."""

from __future__ import annotations

import struct

import pytest
from async_scenario import AsyncRun, GatedStore, finite_state
from checkpoint_scenario import (
    SPECS,
    Fault,
    WatchedStore,
    assert_restored,
    entries,
    newest_commit,
    progress_at,
    restore_world,
)

from raydist.checkpoint.restore import read_commit
from raydist.errors import CheckpointError, FencedError, RankFailedError, StorageError
from raydist.testing.memory_store import MemoryStore


def committed_steps(store: MemoryStore) -> list[int]:
    return [entry.facts["step"] for entry in entries(store) if entry.kind == "committed"]


def test_state_that_changes_after_the_save_is_saved_as_it_was() -> None:
    store = MemoryStore()
    gated = GatedStore(store)
    run = AsyncRun(gated)
    state = finite_state(1)
    live = {spec: bytearray(raw) for spec, raw in state.items()}
    run.begin({spec: memoryview(raw) for spec, raw in live.items()}, 4)  # type: ignore[misc]
    assert gated.reached.wait(20)
    for raw in live.values():
        raw[:] = bytes(len(raw))  # the next step
    assert run.agree() == [True, True]
    assert newest_commit(store) is None
    gated.gate.set()
    run.settle()
    assert run.agree() == [False, False]
    assert_restored(restore_world(store, 3), state)
    commit = newest_commit(store)
    assert commit is not None
    manifest, _ = read_commit(store, commit)
    assert manifest.progress == progress_at(4)
    assert manifest.scalars == {"adam_step": 4.0}
    assert sorted(run.committed) == [(0, 4), (1, 4)]


def test_saves_one_after_another_use_one_snapshot_and_are_all_restored() -> None:
    store = MemoryStore()
    made: list[int] = []

    def allocate(num_bytes: int) -> memoryview:
        made.append(num_bytes)
        return memoryview(bytearray(num_bytes))

    run = AsyncRun(store, allocate=allocate)
    for step in (1, 2, 3):
        run.begin(finite_state(step), step)
        run.settle()
        assert_restored(restore_world(store, 2), finite_state(step))
        (finished,) = run.savers[0].take_finished()
        assert finished.outcome.committed
        assert finished.persist_s >= finished.outcome.seconds > 0
    assert len(made) == run.world_size
    assert run.savers[0].take_finished() == []


def test_save_while_one_is_in_flight_is_refused() -> None:
    gated = GatedStore(MemoryStore())
    run = AsyncRun(gated)
    run.begin(finite_state(1), 1)
    with pytest.raises(CheckpointError, match="step 2 began before that of step 1 was over"):
        run.savers[0].save(run.export(finite_state(2), 0, 2), progress=progress_at(2))
    gated.gate.set()
    run.settle()
    assert committed_steps(gated.inner) == [1]  # type: ignore[arg-type]


def test_all_ranks_hear_that_one_of_them_is_busy() -> None:
    store = MemoryStore()
    gated = GatedStore(store)
    run = AsyncRun(store, rank_stores={1: gated})
    run.begin(finite_state(1), 1)
    assert gated.reached.wait(20)
    asked: list[bool] = []
    assert run.agree(lambda is_busy: asked.append(is_busy) or "skip") == ["skip", "skip"]
    assert asked == [True]  # rank 0 alone decides
    gated.gate.set()
    run.settle()
    assert run.agree() == [False, False]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_state_that_is_not_finite_on_one_rank_is_never_committed(bad: float) -> None:
    store = MemoryStore()
    run = AsyncRun(store)
    run.begin(finite_state(1), 1)
    run.settle()
    state = finite_state(2)
    raw = bytearray(state[SPECS[1]])
    raw[-4:] = struct.pack("<f", bad)
    state[SPECS[1]] = bytes(raw)
    run.begin(state, 2)
    run.settle()
    outcomes = [saver.take_finished()[-1].outcome for saver in run.savers]
    assert {o.committed for o in outcomes} == {False}
    assert {o.why for o in outcomes} == {outcomes[0].why}
    assert "rank 1: exp_avg/embed.weight is not finite in element 34" in outcomes[0].why
    assert committed_steps(store) == [1]
    assert run.agree() == [False, False]
    run.begin(finite_state(3), 3)
    run.settle()
    assert committed_steps(store) == [1, 3]


def test_rank_that_cannot_export_abandons_the_save_for_all() -> None:
    store = MemoryStore()
    run = AsyncRun(store)
    run.begin(finite_state(1), 1, errors={1: CheckpointError(problem="device lost")})
    run.settle()
    for saver in run.savers:
        (finished,) = saver.take_finished()
        assert finished.outcome.why == "rank 1: device lost"
    assert [entry.kind for entry in entries(store)] == ["opened", "abandoned"]


def test_rank_without_memory_for_its_snapshot_abandons_until_it_has_it() -> None:
    store = MemoryStore()
    refusals = [True] * 3  # both ranks at the start, and one at the first save

    def allocate(num_bytes: int) -> memoryview:
        if refusals:
            refusals.pop()
            raise MemoryError("host is full")
        return memoryview(bytearray(num_bytes))

    run = AsyncRun(store, allocate=allocate)
    run.begin(finite_state(1), 1)
    run.settle()
    (finished,) = run.savers[0].take_finished()
    assert "rank 0: No memory for the snapshot" in finished.outcome.why
    run.begin(finite_state(2), 2)
    run.settle()
    assert committed_steps(store) == [2]


def test_too_many_abandoned_in_a_row_are_raised_by_every_rank_at_the_same_agreement() -> None:
    store = MemoryStore()
    bad = WatchedStore(store, Fault(operation="put", part=".safetensors"))
    run = AsyncRun(store, world_size=3, max_abandoned=2, rank_stores={2: bad})
    for step, is_over in ((1, False), (2, True)):
        run.begin(finite_state(step), step)
        run.settle()
        for found in run.agree():
            if is_over:
                assert isinstance(found, CheckpointError)
                assert "2 saves in a row were abandoned, the last at step 2" in str(found)
                assert "rank 2: injected" in str(found)
            else:
                assert found is False


def test_replaced_attempt_is_told_on_every_rank_and_before_anything_else() -> None:
    store = MemoryStore()
    old = AsyncRun(store)
    old.begin(finite_state(1), 1)
    old.settle()
    AsyncRun(store, driver="driver-b", takeover=True)
    old.begin(finite_state(2), 2)
    old.settle()
    old.savers[0]._error, old.savers[1]._error = (
        StorageError(problem="another trouble"),
        old.savers[1]._error,
    )
    for found in old.agree():
        assert isinstance(found, FencedError)
        assert (found.attempt, found.holder_attempt) == (1, 2)
    assert committed_steps(store) == [1]


def test_what_is_not_raydists_own_names_the_rank_and_keeps_the_traceback() -> None:
    class Broken(MemoryStore):
        def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
            if key.endswith(".safetensors"):
                raise ZeroDivisionError("a bug")
            super().put(key, data, if_absent=if_absent)

    store = MemoryStore()
    run = AsyncRun(store, rank_stores={1: Broken()}, world_size=2)
    # Rank 0 waits for a report that never comes; its collective ends with the test's group.
    run.saving._limit_s = 0.5
    run.begin(finite_state(1), 1)
    run.settle()
    for found in run.agree():
        assert isinstance(found, RankFailedError)
    assert isinstance(run.savers[1]._error, RankFailedError)
    assert run.savers[1]._error.rank == 1
    assert "ZeroDivisionError: a bug" in run.savers[1]._error.text
    assert committed_steps(store) == []
