# SPDX-License-Identifier: Apache-2.0
"""Saves that all ranks end the same way, whatever one of them meets.

Faked: ranks are threads; failures of the store. Real: stores, journal and saver.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from checkpoint_scenario import (
    IDENTITY,
    SPECS,
    Fault,
    ToyRun,
    WatchedStore,
    assert_restored,
    entries,
    local_ranges,
    newest_commit,
    progress_at,
    random_state,
    restore_world,
)

from raydist.checkpoint.attempt import Attempt
from raydist.checkpoint.group import Group
from raydist.checkpoint.layout import journal_key, manifest_key, part_key
from raydist.checkpoint.restore import read_commit
from raydist.checkpoint.saver import SaveOutcome, Saver
from raydist.errors import CheckpointError, FencedError, RaydistError, StorageError
from raydist.testing.memory_store import MemoryStore
from raydist.testing.single_rank import SingleRank


def same_on_all(outcomes: Sequence[SaveOutcome]) -> SaveOutcome:
    """Ranks agree on everything but how long it took them."""
    facts = {(o.step, o.committed, o.manifest_key, o.why) for o in outcomes}
    assert len(facts) == 1, facts
    return outcomes[0]


def test_save_commits_the_same_on_every_rank_and_says_everything() -> None:
    store = MemoryStore()
    run = ToyRun(store, world_size=3)
    outcome = same_on_all(run.save(random_state(1), 7))
    assert outcome.committed
    assert (outcome.step, outcome.why) == (7, "")
    assert outcome.manifest_key == manifest_key(7, 1)
    commit = newest_commit(store)
    assert commit is not None
    assert commit.facts["step"] == 7
    manifest, raw = read_commit(store, commit)
    assert manifest.progress == progress_at(7)
    assert manifest.scalars == {"adam_step": 7.0}
    assert (manifest.run, manifest.strategy, manifest.precision, manifest.config_hash) == (
        IDENTITY.run,
        IDENTITY.strategy,
        IDENTITY.precision,
        IDENTITY.config_hash,
    )
    assert (manifest.attempt, manifest.world_size) == (1, 3)
    assert [o.key for o in manifest.objects] == [part_key(7, 1, rank, 3) for rank in range(3)]
    rng = {f"rng/cpu/rank-{rank:05d}-of-00003" for rank in range(3)}
    assert manifest.tensors.keys() == {spec.key for spec in SPECS} | rng
    assert commit.facts["manifest_bytes"] == len(raw)


def test_save_writes_replicated_state_once() -> None:
    sizes = []
    for world_size in (1, 4):
        store = WatchedStore(MemoryStore())
        ToyRun(store, world_size=world_size).save(random_state(1), 1)
        commit = newest_commit(store)
        assert commit is not None
        manifest, _ = read_commit(store, commit)
        sizes.append(sum(stored.length for key in SPECS for _, stored in manifest.ranges[key.key]))
        puts = [r.key for r in store.requests if r.operation == "put"]
        assert len(puts) == len(set(puts)) + puts.count("journal/hint") - 1
    assert sizes[0] == sizes[1] == sum(spec.numel for spec in SPECS)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_save_with_one_ranks_put_failing_is_abandoned_by_all_and_the_next_commits(
    bad: int,
) -> None:
    store = MemoryStore()
    flaky = WatchedStore(store, Fault(operation="put", part=".safetensors", times=1))
    run = ToyRun(store, world_size=3, rank_stores={bad: flaky})
    outcome = same_on_all(run.save(random_state(1), 5))
    assert not outcome.committed
    assert outcome.manifest_key == ""
    assert f"rank {bad}: injected: put" in outcome.why
    assert newest_commit(store) is None
    tail = entries(store)[-1]
    assert tail.kind == "abandoned"
    assert tail.facts == {"step": 5, "why": outcome.why, "ranks": [bad]}
    assert same_on_all(run.save(random_state(2), 6)).committed
    assert_restored(restore_world(store, 2), random_state(2))


def test_save_with_several_ranks_failing_names_each() -> None:
    store = MemoryStore()
    bad = WatchedStore(store, Fault(operation="put", part=".safetensors"))
    run = ToyRun(store, world_size=4, rank_stores={1: bad, 3: bad})
    outcome = same_on_all(run.save(random_state(1), 5))
    assert "rank 1: " in outcome.why
    assert "rank 3: " in outcome.why
    assert entries(store)[-1].facts["ranks"] == [1, 3]


@pytest.mark.parametrize("bad", [0, 2])
def test_save_of_a_rank_with_an_error_instead_of_ranges_is_abandoned_by_all(bad: int) -> None:
    store = MemoryStore()
    run = ToyRun(store, world_size=3)
    run.save(random_state(1), 1)
    error = CheckpointError(problem="master/w is not finite in elements [0, 5)")
    outcome = same_on_all(run.save(random_state(2), 2, errors={bad: error}))
    assert not outcome.committed
    assert f"rank {bad}: master/w is not finite" in outcome.why
    assert entries(store)[-1].facts["ranks"] == [bad]
    assert_restored(restore_world(store, 3), random_state(1))
    assert same_on_all(run.save(random_state(3), 3)).committed


def test_save_of_a_rank_out_of_memory_is_abandoned_by_all() -> None:
    class Full(MemoryStore):
        def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
            raise MemoryError("no room")

    store = MemoryStore()
    run = ToyRun(store, rank_stores={1: Full()})
    outcome = same_on_all(run.save(random_state(1), 1))
    assert not outcome.committed
    assert "rank 1: no room" in outcome.why


def test_save_whose_manifest_cannot_be_put_is_abandoned_by_all() -> None:
    store = WatchedStore(MemoryStore(), Fault(operation="put", part="manifest.json", times=1))
    run = ToyRun(store, world_size=3)
    outcome = same_on_all(run.save(random_state(1), 1))
    assert not outcome.committed
    assert "rank 0: injected: put" in outcome.why
    assert [entry.kind for entry in entries(store)] == ["opened", "abandoned"]
    assert entries(store)[-1].facts["ranks"] == [0]
    assert same_on_all(run.save(random_state(2), 2)).committed


def test_save_whose_ranges_do_not_cover_a_tensor_is_never_committed() -> None:
    store = MemoryStore()
    run = ToyRun(store, world_size=2)

    def save(member: Group) -> SaveOutcome:
        ranges = local_ranges(random_state(1), rank=member.rank, world_size=2)
        if member.rank == 1:
            del ranges[0]
        saver = run.savers[member.rank]
        return saver.save(ranges, progress=progress_at(1), scalars={})

    outcome = same_on_all(run.group.run(save))
    assert not outcome.committed
    assert SPECS[0].key in outcome.why
    assert newest_commit(store) is None
    assert store.size(manifest_key(1, 1)) is None
    assert entries(store)[-1].kind == "abandoned"


def test_save_that_cannot_be_journaled_is_of_unknown_result_on_every_rank() -> None:
    store = WatchedStore(MemoryStore())
    run = ToyRun(store, world_size=3)
    store.faults.append(Fault(operation="put", part="journal/0", times=1))
    outcome = same_on_all(run.save(random_state(1), 1))
    assert not outcome.committed
    assert "rank 0: whether step 1 is committed is unknown" in outcome.why
    assert "injected: put" in outcome.why
    assert newest_commit(store) is None
    assert same_on_all(run.save(random_state(2), 2)).committed


def test_save_whose_commit_reply_is_lost_is_committed() -> None:
    store = WatchedStore(MemoryStore())
    run = ToyRun(store, world_size=2)
    store.faults.append(Fault(operation="put", part=journal_key(2), times=1, after=True))
    assert same_on_all(run.save(random_state(1), 1)).committed
    assert [entry.kind for entry in entries(store)] == ["opened", "committed"]


def test_save_with_a_rank_failing_while_the_journal_fails_still_names_the_rank() -> None:
    store = MemoryStore()
    journal_fails = WatchedStore(store)
    put_fails = WatchedStore(store, Fault(operation="put", part=".safetensors"))
    run = ToyRun(store, world_size=2, rank_stores={0: journal_fails, 1: put_fails})
    journal_fails.faults.append(Fault(operation="put", part="journal/0"))
    outcome = same_on_all(run.save(random_state(1), 1))
    assert not outcome.committed
    assert "rank 1: injected: put checkpoints/" in outcome.why
    assert "rank 0: injected: put journal/" in outcome.why


def test_too_many_abandoned_saves_in_a_row_end_the_run_on_every_rank() -> None:
    store = MemoryStore()
    bad = WatchedStore(store, Fault(operation="put", part=".safetensors", times=3))
    run = ToyRun(store, world_size=3, max_abandoned=3, rank_stores={2: bad})
    assert not same_on_all(run.save(random_state(1), 1)).committed
    assert not same_on_all(run.save(random_state(1), 2)).committed
    for outcome in run.save_outcomes(random_state(1), 3):
        assert isinstance(outcome, CheckpointError)
        assert "3 saves in a row" in str(outcome)
        assert "rank 2: injected" in str(outcome)
        assert "checkpoint.max_abandoned" in str(outcome)


def test_abandoned_saves_with_a_commit_between_do_not_add_up() -> None:
    store = MemoryStore()
    fault = Fault(operation="put", part=".safetensors", times=0)
    run = ToyRun(store, max_abandoned=2, rank_stores={1: WatchedStore(store, fault)})
    for step in range(1, 9):
        fault.times = step % 2
        assert same_on_all(run.save(random_state(1), step)).committed == (step % 2 == 0)


@pytest.mark.parametrize("with_failed_rank", [False, True])
def test_fenced_attempt_raises_on_every_rank_with_the_holder(with_failed_rank: bool) -> None:
    store = MemoryStore()
    old = ToyRun(store, world_size=3)
    old.save(random_state(1), 1)
    new = ToyRun(store, driver="driver-b", takeover=True)
    errors: dict[int, RaydistError] = (
        {1: CheckpointError(problem="not finite")} if with_failed_rank else {}
    )
    for outcome in old.save_outcomes(random_state(2), 2, errors=errors):
        assert isinstance(outcome, FencedError)
        assert (outcome.run, outcome.attempt, outcome.holder_attempt) == ("toy", 1, 2)
        assert outcome.holder == new.attempt.tail.holder
        assert "replaced by attempt 2" in str(outcome)
    assert [entry.attempt for entry in entries(store)] == [1, 1, 2]
    assert_restored(restore_world(store, 2), random_state(1))


def test_fenced_attempt_that_cannot_put_its_manifest_learns_of_it_too() -> None:
    store = WatchedStore(MemoryStore())
    old = ToyRun(store, world_size=2)
    ToyRun(store, driver="driver-b", takeover=True)
    store.faults.append(Fault(operation="put", part="manifest.json"))
    for outcome in old.save_outcomes(random_state(2), 2):
        assert isinstance(outcome, FencedError)


def test_attempts_saving_one_step_never_mix_objects() -> None:
    store = MemoryStore()
    old = ToyRun(store, world_size=2)
    old.save(random_state(1), 5)
    kept = {key: store.get(key) for key, _ in store.list("checkpoints/")}
    new = ToyRun(store, world_size=2)
    new.save(random_state(2), 5)
    old.save_outcomes(random_state(3), 6)
    assert {key: store.get(key) for key in kept} == kept
    assert_restored(restore_world(store, 3), random_state(2))


def test_saves_of_one_step_by_one_attempt_never_mix_objects() -> None:
    """A request of the first may take effect when it was given up long ago."""
    store = MemoryStore()
    flaky = WatchedStore(store, Fault(operation="put", part=".safetensors", times=1))
    run = ToyRun(store, world_size=2, rank_stores={1: flaky})
    assert not same_on_all(run.save(random_state(1), 5)).committed
    outcome = same_on_all(run.save(random_state(2), 5))
    assert outcome.manifest_key == manifest_key(5, 1, 2) != manifest_key(5, 1)
    store.put(part_key(5, 1, 1, 2), b"late")
    assert_restored(restore_world(store, 2), random_state(2))
    assert same_on_all(run.save(random_state(3), 6)).manifest_key == manifest_key(6, 1)


def test_rank_0_without_an_attempt_ends_the_save_on_every_rank() -> None:
    store = MemoryStore()
    run = ToyRun(store, world_size=2)

    def save(member: Group) -> SaveOutcome:
        saver = Saver(
            store=store,
            group=member,
            attempt_number=1,
            attempt=None,
            identity=IDENTITY,
            max_abandoned=3,
        )
        ranges = local_ranges(random_state(1), rank=member.rank, world_size=2)
        return saver.save(ranges, progress=progress_at(1), scalars={})

    outcome = same_on_all([o for o in run.group.run(save) if isinstance(o, SaveOutcome)])
    assert not outcome.committed
    assert "holds no attempt" in outcome.why


def test_save_in_a_world_of_one_needs_no_group() -> None:
    store = MemoryStore()
    attempt: Attempt = ToyRun(store, world_size=1).attempt
    saver = Saver(
        store=store,
        group=SingleRank(),
        attempt_number=attempt.number,
        attempt=attempt,
        identity=IDENTITY,
        max_abandoned=1,
    )
    ranges = local_ranges(random_state(1), rank=0, world_size=1)
    assert saver.save(ranges, progress=progress_at(1), scalars={}).committed
    error = StorageError(problem="full")
    with pytest.raises(CheckpointError, match="1 saves in a row"):
        saver.save(error, progress=progress_at(2), scalars={})
