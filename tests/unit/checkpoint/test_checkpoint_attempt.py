# SPDX-License-Identifier: Apache-2.0
"""Who may write a run: attempts opened, fenced, refused, taken over.

Faked: time, other drivers' leases, lost replies. Real: stores, threads, processes of this host.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_scenario import Fault, WatchedStore, entries

from raydist.checkpoint.attempt import Attempt, open_attempt
from raydist.checkpoint.journal import Entry, Journal
from raydist.checkpoint.layout import journal_key, lease_key
from raydist.checkpoint.lease import (
    LEASE_RENEW_S,
    LEASE_SILENCE_S,
    Holder,
    RenewalThread,
    refuse_if_alive,
)
from raydist.errors import CommitUnknownError, FencedError, RunAliveError, StorageError
from raydist.storage import ObjectStore
from raydist.storage.local import LocalStore
from raydist.testing.fake_clock import FakeClock
from raydist.testing.memory_store import MemoryStore

Open = Callable[..., Attempt]


@pytest.fixture
def open_on() -> Iterator[Open]:
    """open_attempt, with its lease stopped at the end of the test."""
    opened: list[Attempt] = []
    lock = threading.Lock()

    def open_it(
        store: ObjectStore,
        driver: str = "driver-a",
        *,
        clock: FakeClock | None = None,
        takeover: bool = False,
    ) -> Attempt:
        made = open_attempt(
            run="toy", store=store, driver=driver, clock=clock or FakeClock(), takeover=takeover
        )
        with lock:
            opened.append(made)
        return made

    yield open_it
    for made in opened:
        made.release()


class LeaseClock(FakeClock):
    """As it is slept through, another driver's attempt renews its lease."""

    def __init__(self, store: ObjectStore, attempt: int, *, every_s: float = LEASE_RENEW_S) -> None:
        super().__init__()
        self._store, self._key, self._every_s = store, lease_key(attempt), every_s

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        beats = 7 + int(self.monotonic_s() / self._every_s)
        self._store.put(self._key, json.dumps({"beats": beats}).encode())


def commit(attempt: Attempt, step: int) -> Entry:
    return attempt.commit(step=step, manifest_key=f"m{step}", manifest_bytes=9, crc32c=step)


def renewal_of(attempt: Attempt) -> RenewalThread:
    assert isinstance(attempt.renewal, RenewalThread)
    return attempt.renewal


def kinds(store: ObjectStore) -> list[tuple[int, str, int]]:
    return [(entry.number, entry.kind, entry.attempt) for entry in entries(store)]


def leave_behind(store: ObjectStore, holder: Holder, *, beats: int | None = 3) -> Entry:
    """A journal whose newest entry another driver wrote, and its lease."""
    tail = Entry(
        number=1,
        kind="opened",
        attempt=1,
        driver="driver-b",
        holder=str(holder),
        unix_s=0.0,
        last_commit=None,
    )
    Journal(store).append(tail)
    if beats is not None:
        store.put(lease_key(1), json.dumps({"beats": beats}).encode())
    return tail


ELSEWHERE = Holder(host="another-host/1-2", pid=1, started="5")


def dead_process() -> Holder:
    here = Holder.this_process()
    return replace(here, started=f"{here.started}0")  # this pid, in an earlier life


def test_open_of_a_new_run_writes_the_first_entry_and_a_lease(open_on: Open) -> None:
    store = MemoryStore()
    clock = FakeClock()
    attempt = open_on(store, clock=clock)
    (entry,) = entries(store)
    assert (entry.number, entry.kind, entry.attempt, entry.last_commit) == (1, "opened", 1, None)
    assert entry.driver == "driver-a"
    assert entry.holder == str(Holder.this_process())
    assert entry.unix_s == clock.now_unix_s()
    assert attempt.number == 1
    assert json.loads(store.get(lease_key(1)))["beats"] == 1
    assert clock.monotonic_s() == 0


def test_journal_of_two_attempts_is_consecutive_and_knows_its_newest_commit(
    open_on: Open,
) -> None:
    store = MemoryStore()
    first = open_on(store)
    commit(first, 10)
    first.abandon(step=20, why="rank 1: no", ranks=[1])
    second = open_on(store)
    commit(second, 20)
    second.close("finished")
    assert kinds(store) == [
        (1, "opened", 1),
        (2, "committed", 1),
        (3, "abandoned", 1),
        (4, "opened", 2),
        (5, "committed", 2),
        (6, "closed", 2),
    ]
    assert [entry.last_commit for entry in entries(store)] == [None, 2, 2, 2, 5, 5]
    assert entries(store)[1].facts == {
        "step": 10,
        "manifest": "m10",
        "manifest_bytes": 9,
        "manifest_crc32c": 10,
    }
    assert entries(store)[2].facts == {"step": 20, "why": "rank 1: no", "ranks": [1]}
    assert entries(store)[5].facts == {"why": "finished"}


def test_open_by_the_same_driver_replaces_at_once(open_on: Open) -> None:
    store = MemoryStore()
    open_on(store)
    clock = FakeClock()
    assert open_on(store, clock=clock).number == 2
    assert clock.monotonic_s() == 0


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_open_by_many_at_once_gives_distinct_attempts_and_fences_all_but_the_last(
    open_on: Open, tmp_path: Path, kind: str
) -> None:
    store = MemoryStore() if kind == "memory" else LocalStore(str(tmp_path))
    count = 6
    gate = threading.Barrier(count)
    opened: list[Attempt] = []

    def race() -> None:
        gate.wait(20)
        opened.append(open_on(store))

    threads = [threading.Thread(target=race) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    opened.sort(key=lambda attempt: attempt.number)
    assert [attempt.number for attempt in opened] == list(range(1, count + 1))
    assert kinds(store) == [(n, "opened", n) for n in range(1, count + 1)]
    for attempt in opened[:-1]:
        for _ in range(2):
            with pytest.raises(FencedError) as caught:
                commit(attempt, 5)
        assert caught.value.attempt == attempt.number
        assert caught.value.holder_attempt > attempt.number
        assert caught.value.holder == str(Holder.this_process())
    assert commit(opened[-1], 5).number == count + 1


@pytest.mark.parametrize("seed", range(20))
def test_open_by_two_drivers_at_once_lets_exactly_one_in(open_on: Open, seed: int) -> None:
    store = MemoryStore()
    gate = threading.Barrier(2)
    results: dict[str, Attempt | RunAliveError] = {}

    def race(driver: str) -> None:
        gate.wait(20)
        try:
            results[driver] = open_on(store, driver, clock=LeaseClock(store, 1))
        except RunAliveError as error:
            results[driver] = error

    threads = [threading.Thread(target=race, args=(driver,)) for driver in ("x", "y")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    winners = [one for one in results.values() if isinstance(one, Attempt)]
    assert len(results) == 2
    assert [attempt.number for attempt in winners] == [1]
    assert kinds(store) == [(1, "opened", 1)]


def test_commit_race_of_two_attempts_has_one_history(open_on: Open) -> None:
    for _ in range(20):
        store = MemoryStore()
        old = open_on(store)
        gate = threading.Barrier(2)
        fenced: list[FencedError] = []

        def save(
            old: Attempt = old,
            gate: threading.Barrier = gate,
            fenced: list[FencedError] = fenced,
        ) -> None:
            gate.wait(20)
            try:
                for step in range(1, 50):
                    commit(old, step)
            except FencedError as error:
                fenced.append(error)

        thread = threading.Thread(target=save)
        thread.start()
        gate.wait(20)
        new = open_on(store)
        thread.join(20)
        found = entries(store)
        at = next(n for n, entry in enumerate(found) if entry.attempt == 2)
        assert all(entry.attempt == 1 for entry in found[:at])
        assert found[at:] == [new.tail]
        assert new.tail.last_commit == (at if at > 1 else None)
        assert bool(fenced) or at == 50


@pytest.mark.parametrize("act", ["commit", "abandon", "close"])
def test_fenced_attempt_stops_its_lease_and_can_do_nothing(open_on: Open, act: str) -> None:
    store = MemoryStore()
    old = open_on(store)
    open_on(store, "driver-b", takeover=True)
    before = kinds(store)
    with pytest.raises(FencedError) as caught:
        {
            "commit": lambda: commit(old, 1),
            "abandon": lambda: old.abandon(step=1, why="", ranks=[]),
            "close": lambda: old.close("finished"),
        }[act]()
    assert caught.value.run == "toy"
    assert kinds(store) == before
    assert renewal_of(old).is_stopping


@pytest.mark.parametrize("act", ["commit", "abandon", "close"])
def test_append_whose_reply_was_lost_is_found_by_reading_and_not_repeated(
    open_on: Open, act: str
) -> None:
    store = WatchedStore(MemoryStore())
    attempt = open_on(store)
    commit(attempt, 1)
    store.faults.append(Fault(operation="put", part=journal_key(3), times=1, after=True))
    made = {
        "commit": lambda: commit(attempt, 2),
        "abandon": lambda: attempt.abandon(step=2, why="w", ranks=[0]),
        "close": lambda: attempt.close("finished"),
    }[act]()
    assert [number for number, _, _ in kinds(store)] == [1, 2, 3]
    assert attempt.tail == entries(store)[2]
    assert made is None or made == attempt.tail


def test_open_whose_first_beat_fails_stands(open_on: Open) -> None:
    store = WatchedStore(MemoryStore(), Fault(operation="put", part="alive", times=1))
    assert open_on(store).number == 1
    assert kinds(store) == [(1, "opened", 1)]


def test_open_with_a_hint_that_cannot_be_read_searches_longer(open_on: Open) -> None:
    store = WatchedStore(MemoryStore())
    open_on(store).close("finished")
    store.faults.append(Fault(operation="get", part="hint"))
    assert open_on(store).number == 2


def test_commit_of_unknown_result_says_so_with_its_step(open_on: Open) -> None:
    store = WatchedStore(MemoryStore())
    attempt = open_on(store)
    store.faults.append(Fault(operation="put", part=journal_key(2), times=1))
    with pytest.raises(CommitUnknownError, match="step 7 is committed is unknown") as caught:
        commit(attempt, 7)
    assert caught.value.step == 7
    assert attempt.commits == []


def test_commits_of_an_attempt_are_its_own_also_those_found_late(open_on: Open) -> None:
    store = WatchedStore(MemoryStore())
    commit(open_on(store), 1)
    attempt = open_on(store)
    lose_one_commit(store, attempt, 2)
    assert attempt.commits == []
    commit(attempt, 3)
    assert [entry.facts["step"] for entry in attempt.commits] == [2, 3]


def test_open_whose_reply_was_lost_is_found_and_not_repeated(open_on: Open) -> None:
    store = WatchedStore(
        MemoryStore(), Fault(operation="put", part=journal_key(1), times=1, after=True)
    )
    assert open_on(store).number == 1
    assert kinds(store) == [(1, "opened", 1)]


def lose_one_commit(store: WatchedStore, attempt: Attempt, step: int) -> None:
    """A commit of which this writer does not learn that it took effect."""
    key = journal_key(attempt.tail.number + 1)
    store.faults.append(Fault(operation="put", part=key, times=1, after=True))
    store.faults.append(Fault(operation="get", part=key, times=1))
    with pytest.raises(StorageError):
        commit(attempt, step)


def test_commit_of_unknown_result_said_again_is_one_commit(open_on: Open) -> None:
    store = WatchedStore(MemoryStore())
    attempt = open_on(store)
    lose_one_commit(store, attempt, 1)
    assert commit(attempt, 1).number == 2
    assert kinds(store) == [(1, "opened", 1), (2, "committed", 1)]


def test_commit_of_unknown_result_is_stepped_over_by_the_next_one(open_on: Open) -> None:
    store = WatchedStore(MemoryStore())
    attempt = open_on(store)
    lose_one_commit(store, attempt, 1)
    assert attempt.abandon(step=2, why="w", ranks=[1]).last_commit == 2
    assert commit(attempt, 3).last_commit == 4
    assert [(entry.kind, entry.facts["step"]) for entry in entries(store)[1:]] == [
        ("committed", 1),
        ("abandoned", 2),
        ("committed", 3),
    ]


def test_commit_that_never_arrived_can_be_said_again(open_on: Open) -> None:
    store = WatchedStore(MemoryStore())
    attempt = open_on(store)
    store.faults.append(Fault(operation="put", part=journal_key(2), times=1))
    with pytest.raises(StorageError, match="injected"):
        commit(attempt, 1)
    assert commit(attempt, 1).number == 2
    assert kinds(store) == [(1, "opened", 1), (2, "committed", 1)]


def test_closed_run_is_opened_by_another_driver_without_waiting(open_on: Open) -> None:
    store = MemoryStore()
    open_on(store).close("finished")
    clock = LeaseClock(store, 1)
    assert open_on(store, "driver-b", clock=clock).number == 2
    assert clock.monotonic_s() == 0


def test_run_of_a_dead_process_of_this_host_is_opened_without_waiting(open_on: Open) -> None:
    store = MemoryStore()
    leave_behind(store, dead_process())
    clock = LeaseClock(store, 1)
    assert open_on(store, clock=clock).number == 2
    assert clock.monotonic_s() == 0


def test_run_whose_lease_beats_elsewhere_is_refused_in_time_with_its_holder(
    open_on: Open,
) -> None:
    store = MemoryStore()
    leave_behind(store, ELSEWHERE)
    clock = LeaseClock(store, 1)
    with pytest.raises(RunAliveError, match="another-host/1-2") as caught:
        open_on(store, clock=clock)
    assert clock.monotonic_s() <= LEASE_SILENCE_S
    assert "attempt 1" in str(caught.value)
    assert "--takeover" in caught.value.way_out
    assert kinds(store) == [(1, "opened", 1)]


def test_run_of_a_living_process_of_this_host_is_refused(open_on: Open) -> None:
    store = MemoryStore()
    leave_behind(store, Holder.this_process())
    with pytest.raises(RunAliveError):
        open_on(store, clock=LeaseClock(store, 1))


def test_run_whose_first_beat_comes_while_waiting_is_refused(open_on: Open) -> None:
    store = MemoryStore()
    leave_behind(store, ELSEWHERE, beats=None)
    with pytest.raises(RunAliveError):
        open_on(store, clock=LeaseClock(store, 1))


@pytest.mark.parametrize("beats", [3, None])
def test_run_whose_lease_is_silent_is_opened_after_the_silence(
    open_on: Open, beats: int | None
) -> None:
    store = MemoryStore()
    leave_behind(store, ELSEWHERE, beats=beats)
    clock = FakeClock()
    assert open_on(store, clock=clock).number == 2
    assert LEASE_SILENCE_S <= clock.monotonic_s() <= LEASE_SILENCE_S + 1


@pytest.mark.parametrize("raw", [b"", b"garbage", b"\xff", b"[]", b"null", b"7", b"{}"])
def test_lease_that_is_garbage_is_a_silent_one(open_on: Open, raw: bytes) -> None:
    store = MemoryStore()
    leave_behind(store, ELSEWHERE)
    store.put(lease_key(1), raw)
    assert open_on(store).number == 2


def test_takeover_of_a_living_run_opens_at_once_and_fences_it(open_on: Open) -> None:
    store = MemoryStore()
    old = open_on(store, "driver-b")
    commit(old, 1)
    clock = LeaseClock(store, 1)
    new = open_on(store, clock=clock, takeover=True)
    assert clock.monotonic_s() == 0
    assert (new.number, new.tail.last_commit) == (2, 2)
    with pytest.raises(FencedError, match="replaced by attempt 2"):
        commit(old, 2)
    commit(new, 2)


def test_refusal_looks_at_the_tail_that_is_there_when_it_loses_the_race(open_on: Open) -> None:
    store = MemoryStore()
    tail = leave_behind(store, ELSEWHERE)

    class Overtaken(FakeClock):
        """A third driver opens the run while this one waits, and beats."""

        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            number = 2
            if store.size(journal_key(number)) is None:
                Journal(store).append(replace(tail, number=number, attempt=2, driver="driver-c"))
            beats = int(self.monotonic_s())
            store.put(lease_key(2), json.dumps({"beats": beats}).encode())

    with pytest.raises(RunAliveError, match="attempt 2"):
        open_on(store, clock=Overtaken())


def test_refusal_while_the_store_fails_is_the_stores_error(open_on: Open) -> None:
    store = WatchedStore(MemoryStore(), Fault(operation="get", part="alive"))
    tail = leave_behind(store, ELSEWHERE)
    with pytest.raises(StorageError, match="injected"):
        refuse_if_alive(run="toy", store=store, tail=tail, clock=FakeClock())
