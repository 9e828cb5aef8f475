# SPDX-License-Identifier: Apache-2.0
"""Pruning and garbage, as a run does it. Real: journal, saver, stores. Faked: ranks are threads,
requests that the store refuses.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_scenario import (
    Fault,
    ToyRun,
    WatchedStore,
    assert_restored,
    entries,
    random_state,
    restore_world,
)

from raydist.checkpoint.inspect import list_checkpoints, verify_checkpoint, was_pruned
from raydist.checkpoint.layout import journal_key, manifest_key, part_key
from raydist.checkpoint.prune import PruneOutcome, Pruner
from raydist.checkpoint.retention import STALE_UPLOAD_S, RetentionPolicy
from raydist.errors import FencedError
from raydist.storage import ObjectStore
from raydist.storage.local import LocalStore
from raydist.testing.memory_store import MemoryStore


def pruner_of(
    run: ToyRun, store: ObjectStore, *, keep_last: int | None = 1, every: int | None = None
) -> Pruner:
    return Pruner(
        store=store,
        attempt=run.attempt,
        policy=RetentionPolicy(keep_last=keep_last, keep_every_steps=every),
    )


def saved(run: ToyRun, *steps: int) -> None:
    for step in steps:
        run.save(random_state(step), step)


def steps_of(store: ObjectStore) -> list[int]:
    return [info.step for info in list_checkpoints(store)]


def objects_of(store: ObjectStore, step: int) -> list[str]:
    return [key for key, _ in store.list("checkpoints/") if f"step-{step:012d}/" in key]


def test_prune_says_so_in_the_journal_and_then_deletes() -> None:
    store = WatchedStore(MemoryStore())
    run = ToyRun(store)
    saved(run, 1, 2, 3)
    size = sum(n for key, n in store.list("checkpoints/") if "step-000000000003" not in key)
    store.requests.clear()
    outcome = pruner_of(run, store).after_commit()
    assert outcome == PruneOutcome(steps=(2, 1), num_deleted=6, bytes_deleted=size)
    assert steps_of(store) == [3]
    assert [key for key, _ in store.list("checkpoints/")] == [
        manifest_key(3, 1),
        part_key(3, 1, 0, 2),
        part_key(3, 1, 1, 2),
    ]
    tail = entries(store)[-1]
    assert (tail.kind, tail.last_pruned, tail.last_commit) == ("pruned", 5, 4)
    assert tail.facts == {"steps": [2, 1], "commits": [3, 2], "kept": [4]}
    changes = [r for r in store.requests if r.operation in ("put", "delete")]
    assert changes[0].key == journal_key(5)
    deleted = [r.key for r in changes if r.operation == "delete"]
    assert [key.endswith("manifest.json") for key in deleted] == [True, True] + [False] * 4


def test_prune_after_every_commit_keeps_the_last_and_every_nth() -> None:
    store = MemoryStore()
    run = ToyRun(store)
    pruner = pruner_of(run, store, keep_last=2, every=4)
    for step in range(1, 11):
        saved(run, step)
        assert pruner.after_commit().problem == ""
    assert steps_of(store) == [10, 9, 8, 4]
    assert_restored(restore_world(store, 2), random_state(10))


def test_prune_by_the_saver_runs_on_rank_0_after_the_commit() -> None:
    store = MemoryStore()
    run = ToyRun(store)
    run.savers[0]._pruner = pruner_of(run, store)
    saved(run, 1)
    outcomes = run.save(random_state(2), 2)
    assert outcomes[0].pruned == PruneOutcome(
        steps=(1,), num_deleted=3, bytes_deleted=outcomes[0].pruned.bytes_deleted
    )
    assert outcomes[1].pruned is None
    assert steps_of(store) == [2]


def test_without_a_policy_all_stay_and_garbage_goes() -> None:
    store = MemoryStore()
    store.put("checkpoints/notes.txt", b"mine")
    first = ToyRun(store)
    saved(first, 1, 2)
    store.put(part_key(3, 1, 0, 2), b"half of a save that died")
    second = ToyRun(store)
    saved(second, 3)
    outcome = pruner_of(second, store, keep_last=None).after_commit()
    assert (outcome.steps, outcome.num_deleted, outcome.bytes_deleted) == ((), 1, 24)
    assert steps_of(store) == [3, 2, 1]
    assert store.get("checkpoints/notes.txt") == b"mine"
    assert [entry.kind for entry in entries(store)].count("pruned") == 0


def test_objects_of_a_lost_journal_are_left_alone() -> None:
    store = MemoryStore()
    saved(ToyRun(store), 1)
    for key, _ in list(store.list("journal/")):
        store.delete(key)
    run = ToyRun(store)
    saved(run, 2)
    pruner = pruner_of(run, store)
    assert pruner.after_commit() == PruneOutcome()
    assert verify_checkpoint(store, manifest_key(1, 1))[1] == []


def test_newest_that_is_not_readable_is_not_what_the_older_ones_end_for() -> None:
    store = MemoryStore()
    run = ToyRun(store)
    saved(run, 1, 2, 3, 4)
    store.delete(part_key(4, 1, 1, 2))
    assert pruner_of(run, store).after_commit().steps == (2, 1)
    assert steps_of(store) == [4, 3]
    assert_restored(restore_world(store, 2), random_state(3))


def test_nothing_ends_when_none_is_readable() -> None:
    store = MemoryStore()
    run = ToyRun(store)
    saved(run, 1, 2)
    for step in (1, 2):
        store.delete(part_key(step, 1, 0, 2))
    assert pruner_of(run, store).after_commit() == PruneOutcome()
    assert steps_of(store) == [2, 1]


@pytest.mark.parametrize("times", [1, 2, 4])
def test_prune_that_stopped_in_the_middle_goes_on_with_the_next(times: int) -> None:
    """Each delete that fails ends one round; committed checkpoints stay readable throughout."""
    store = WatchedStore(MemoryStore())
    run = ToyRun(store)
    saved(run, 1, 2, 3)
    pruner = pruner_of(run, store)
    store.faults.append(Fault(operation="delete", times=times))
    problem = pruner.after_commit().problem
    assert "injected: delete" in problem
    assert steps_of(store) == [3]
    for step in range(4, 4 + times):
        saved(run, step)
        outcome = pruner.after_commit()
    assert outcome.problem == ""
    assert steps_of(store) == [3 + times]
    assert len(list(store.list("checkpoints/"))) == 3


def test_prune_that_died_in_the_middle_is_finished_by_the_next_attempt() -> None:
    store = WatchedStore(MemoryStore())
    first = ToyRun(store)
    saved(first, 1, 2, 3)
    store.faults.append(Fault(operation="delete", part=".safetensors"))
    pruner_of(first, store).after_commit()
    store.faults.clear()
    assert len(objects_of(store, 1)) == 2
    second = ToyRun(store)
    saved(second, 4)
    pruner_of(second, store, keep_last=None).after_commit()
    assert objects_of(store, 1) == objects_of(store, 2) == []
    assert steps_of(store) == [4, 3]


def test_objects_that_are_gone_already_are_no_problem() -> None:
    store = MemoryStore()
    run = ToyRun(store)
    saved(run, 1, 2)
    for key in objects_of(store, 1):
        store.delete(key)
    assert pruner_of(run, store).after_commit().steps == (1,)


def lose_entry(store: WatchedStore) -> None:
    store.faults.append(Fault(operation="put", part=journal_key(4), times=1))


def lose_reply(store: WatchedStore) -> None:
    store.faults.append(Fault(operation="put", part=journal_key(4), times=1, after=True))
    store.faults.append(Fault(operation="get", part=journal_key(4), times=1))


@pytest.mark.parametrize("lose", [lose_entry, lose_reply])
def test_prune_whose_entry_is_not_known_to_stand_deletes_nothing(
    lose: Callable[[WatchedStore], None],
) -> None:
    store = WatchedStore(MemoryStore())
    run = ToyRun(store)
    saved(run, 1, 2)
    lose(store)
    pruner = pruner_of(run, store)
    assert "injected" in pruner.after_commit().problem
    assert len(objects_of(store, 1)) == 3
    saved(run, 3)
    assert pruner.after_commit().problem == ""
    assert steps_of(store) == [3]
    assert objects_of(store, 1) == objects_of(store, 2) == []


def test_replaced_attempt_prunes_nothing() -> None:
    store = MemoryStore()
    old = ToyRun(store)
    saved(old, 1, 2)
    new = ToyRun(store, driver="driver-b", takeover=True)
    before = list(store.list("checkpoints/"))
    pruner = pruner_of(old, store)
    assert "replaced by attempt 2" in pruner.after_commit().problem
    assert list(store.list("checkpoints/")) == before
    with pytest.raises(FencedError):
        old.attempt.prune([], kept=[])
    assert new.attempt.tail == entries(store)[-1]


def test_replaced_attempt_collects_nothing_of_its_successor() -> None:
    store = MemoryStore()
    old = ToyRun(store)
    saved(old, 1)
    ToyRun(store, driver="driver-b", takeover=True)
    store.put(part_key(2, 2, 0, 2), b"being written")
    assert pruner_of(old, store).finish() == PruneOutcome()
    assert store.get(part_key(2, 2, 0, 2)) == b"being written"


def test_restore_passes_over_pruned_checkpoints() -> None:
    store = MemoryStore()
    run = ToyRun(store)
    saved(run, 10, 15, 20, 30)
    pruner_of(run, store, keep_last=1, every=10).after_commit()
    assert steps_of(store) == [30, 20, 10]
    store.delete(part_key(30, 1, 0, 2))
    store.delete(part_key(20, 1, 0, 2))
    found = restore_world(store, 2)
    assert_restored(found, random_state(10))
    assert [text.split(":")[0] for text in found[0].skipped] == ["step 30", "step 20"]


def test_reader_that_lost_the_race_finds_in_the_journal_why() -> None:
    store = MemoryStore()
    run = ToyRun(store)
    saved(run, 1, 2)
    assert not was_pruned(store, manifest_key(1, 1))
    pruner_of(run, store).after_commit()
    assert was_pruned(store, manifest_key(1, 1))
    assert not was_pruned(store, manifest_key(2, 1))


def test_damaged_journal_stops_pruning_and_is_reported() -> None:
    store = MemoryStore()
    run = ToyRun(store)
    saved(run, 1, 2, 3)
    store.put(journal_key(2), b"garbage")
    before = list(store.list("checkpoints/"))
    assert journal_key(2) in pruner_of(run, store).after_commit().problem
    assert list(store.list("checkpoints/")) == before


def test_pruning_reads_little() -> None:
    """A GET of the newest manifest, a HEAD an object, a LIST an ended checkpoint."""
    store = WatchedStore(MemoryStore())
    run = ToyRun(store, world_size=3)
    pruner = pruner_of(run, store, keep_last=2)
    for step in range(1, 6):
        saved(run, step)
        pruner.after_commit()
    saved(run, 6)
    store.requests.clear()
    pruner.after_commit()
    count = {op: sum(r.operation == op for r in store.requests) for op in ("get", "size", "list")}
    assert count == {"get": 1, "size": 3, "list": 1}
    assert sum(r.operation == "delete" for r in store.requests) == 4


def test_temporary_files_of_dead_writers_go_and_a_live_ones_stay(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    dead = ToyRun(store)
    saved(dead, 1)
    run = ToyRun(store)
    saved(run, 2)

    def leave(folder: str, *, age_s: float) -> Path:
        path = tmp_path / folder / f".tmp-17-{age_s}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"torn")
        os.utime(path, (time.time() - age_s,) * 2)
        return path

    gone = [
        leave("checkpoints/step-000000000009/attempt-0001", age_s=0),
        leave("checkpoints/step-000000000001/attempt-0001", age_s=1),
        leave("journal", age_s=STALE_UPLOAD_S + 5),
        leave("", age_s=STALE_UPLOAD_S + 6),
    ]
    stay = [
        leave("checkpoints/step-000000000003/attempt-0002", age_s=0),
        leave("checkpoints/step-000000000001/attempt-0003", age_s=9e4),
        leave("journal", age_s=10),
    ]
    assert pruner_of(run, store, keep_last=None).after_commit().num_deleted == len(gone)
    assert [path.exists() for path in gone] == [False] * 4
    assert [path.exists() for path in stay] == [True] * 3
