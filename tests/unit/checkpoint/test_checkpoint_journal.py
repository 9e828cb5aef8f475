# SPDX-License-Identifier: Apache-2.0
"""Finding the journal's tail, and appending to it once. Real: MemoryStore, LocalStore, threads.

Faked: replies and requests that the store loses.
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_scenario import Fault, ToyRun, WatchedStore, entries, random_state
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.checkpoint.journal import Entry, Journal
from raydist.checkpoint.layout import JOURNAL_HINT_KEY, journal_key
from raydist.checkpoint.restore import read_commit
from raydist.checkpoint.sealed import seal, unseal
from raydist.errors import CheckpointError, ObjectExistsError, StorageError
from raydist.storage import ObjectStore
from raydist.storage.local import LocalStore
from raydist.testing.memory_store import MemoryStore


def entry(number: int, **changes: object) -> Entry:
    opened = Entry(
        number=number,
        kind="opened",
        attempt=number,
        driver="d",
        holder="host:1:2",
        unix_s=1.7e9 + number / 3,
        last_commit=None,
    )
    return replace(opened, **changes)  # type: ignore[arg-type]


def commit(number: int) -> Entry:
    facts = {"step": number, "manifest": "m", "manifest_bytes": 1, "manifest_crc32c": 2}
    return entry(number, kind="committed", last_commit=number, facts=facts)


def filled(store: ObjectStore, count: int) -> Journal:
    journal = Journal(store)
    for number in range(1, count + 1):
        journal.append(entry(number))
    return journal


def test_entry_that_was_appended_is_read_back_equal() -> None:
    journal = filled(MemoryStore(), 2)
    journal.append(commit(3))
    assert [journal.read(number) for number in (1, 2, 3, 4)] == [
        entry(1),
        entry(2),
        commit(3),
        None,
    ]


HINTS = [
    None,
    b"",
    b"garbage",
    b"\xff\x00",
    b"0",
    b"-3",
    b"1.5",
    b"9" * 30,
    b"9" * 300,
    b"9" * 5000,
    b"1",
    b"16",
    b"17",
    b"18",
    b"40",
]


def hinted(store: ObjectStore, hint: bytes | None) -> Journal:
    store.delete(JOURNAL_HINT_KEY)
    if hint is not None:
        store.put(JOURNAL_HINT_KEY, hint)
    return Journal(store)


@pytest.mark.parametrize("hint", HINTS)
@pytest.mark.parametrize("count", [0, 1, 17])
def test_tail_is_found_whatever_the_hint_says(count: int, hint: bytes | None) -> None:
    store = MemoryStore()
    filled(store, count)
    assert hinted(store, hint).tail() == (entry(count) if count else None)


def test_tail_in_files_is_found_whatever_the_hint_says(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    filled(store, 5)
    for hint in HINTS:
        assert hinted(store, hint).tail() == entry(5)


@settings(deadline=None, database=None)
@given(count=st.integers(0, 150), hint=st.integers(-2, 400) | st.none())
def test_tail_takes_few_requests_and_no_listing(count: int, hint: int | None) -> None:
    store = WatchedStore(MemoryStore())
    journal = filled(store.inner, count)
    store.inner.delete(JOURNAL_HINT_KEY)
    if hint is not None:
        store.inner.put(JOURNAL_HINT_KEY, str(hint).encode())
    found = Journal(store).tail()
    assert found == journal.read(count) if count else found is None
    assert {request.operation for request in store.requests} == {"get"}
    assert len(store.requests) <= 5 + 2 * math.log2(count + 1)


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_tail_with_a_fresh_hint_takes_three_requests(count: int) -> None:
    store = WatchedStore(MemoryStore())
    filled(store.inner, count)
    assert Journal(store).tail() == entry(count)
    assert len(store.requests) == 3


def test_tail_with_a_hint_one_behind_takes_one_request_more() -> None:
    store = WatchedStore(MemoryStore())
    filled(store.inner, 9)
    store.inner.put(JOURNAL_HINT_KEY, b"8")
    assert Journal(store).tail() == entry(9)
    assert len(store.requests) <= 5


def test_resume_decision_takes_five_requests_and_no_listing() -> None:
    inner = MemoryStore()
    run = ToyRun(inner)
    for step in range(1, 8):
        run.save(random_state(step), step)
    run.attempt.close("interrupted")  # so that the tail itself is no commit
    store = WatchedStore(inner)
    journal = Journal(store)
    newest = journal.newest_commit(journal.tail())
    assert newest is not None
    manifest, _ = read_commit(store, newest)
    assert manifest.progress.step == 7
    assert len(store.requests) <= 5
    assert {request.operation for request in store.requests} == {"get"}


def test_commits_are_found_newest_first_from_any_tail() -> None:
    store = MemoryStore()
    journal = filled(store, 2)
    journal.append(commit(3))
    journal.append(entry(4, kind="abandoned", last_commit=3))
    journal.append(commit(5))
    journal.append(entry(6, last_commit=5))
    tail = journal.tail()
    newest = journal.newest_commit(tail)
    assert newest == commit(5)
    assert journal.newest_commit(newest) == commit(5)
    assert journal.newest_commit(None) is None
    assert journal.newest_commit(entry(2)) is None
    assert list(journal.commits(tail)) == [commit(5), commit(3)]
    assert list(journal.commits(commit(3))) == [commit(3)]
    assert list(journal.commits(entry(2))) == list(journal.commits(None)) == []


def pruned(number: int, *, last_commit: int, ended: list[int], kept: list[int]) -> Entry:
    return entry(
        number,
        kind="pruned",
        last_commit=last_commit,
        last_pruned=number,
        facts={"commits": ended, "kept": kept},
    )


def test_commits_leave_out_what_was_pruned_and_read_nothing_of_it() -> None:
    store = WatchedStore(MemoryStore())
    journal = Journal(store)
    for number in range(1, 41):
        journal.append(commit(number))
    journal.append(pruned(41, last_commit=40, ended=[*range(1, 20), *range(21, 40)], kept=[20, 40]))
    newest = [replace(commit(n), last_pruned=41) for n in (42, 43)]
    for one in newest:
        journal.append(one)
    store.requests.clear()
    assert list(journal.commits(newest[1])) == [newest[1], newest[0], commit(40), commit(20)]
    assert len(store.requests) <= 6


def test_commits_after_a_second_pruning_go_by_the_newest() -> None:
    journal = Journal(MemoryStore())
    for number in (1, 2, 3):
        journal.append(commit(number))
    journal.append(pruned(4, last_commit=3, ended=[1], kept=[2, 3]))
    journal.append(pruned(5, last_commit=3, ended=[2], kept=[3]))
    assert list(journal.commits(journal.tail())) == [commit(3)]


@pytest.mark.parametrize("facts", [{}, {"commits": [1]}, {"kept": [1]}], ids=str)
def test_pruned_entry_without_its_facts_is_an_error(facts: dict) -> None:
    store = MemoryStore()
    journal = filled(store, 1)
    odd = replace(pruned(2, last_commit=1, ended=[], kept=[]), facts=facts)
    journal.append(odd)
    with pytest.raises(CheckpointError, match=journal_key(2)):
        journal.read(2)


def test_pruned_entry_that_is_named_and_gone_is_an_error_not_none_pruned() -> None:
    store = MemoryStore()
    journal = filled(store, 1)
    journal.append(commit(2))
    journal.append(pruned(3, last_commit=2, ended=[], kept=[2]))
    journal.append(entry(4, last_commit=2, last_pruned=3))
    store.delete(journal_key(3))
    with pytest.raises(CheckpointError, match=journal_key(3)):
        list(journal.commits(journal.tail()))


def test_entry_of_a_time_without_pruning_is_read() -> None:
    store = MemoryStore()
    filled(store, 1)
    old = unseal(store.get(journal_key(1)))
    del old["last_pruned"]
    store.put(journal_key(1), seal(old))
    assert Journal(store).read(1) == entry(1)


def test_commit_that_the_tail_names_and_is_not_there_is_an_error_not_a_new_run() -> None:
    store = MemoryStore()
    journal = filled(store, 1)
    journal.append(commit(2))
    journal.append(entry(3, last_commit=2))
    store.delete(journal_key(2))
    with pytest.raises(CheckpointError, match=journal_key(2)):
        journal.newest_commit(journal.tail())
    with pytest.raises(CheckpointError, match=journal_key(2)):
        list(journal.commits(replace(entry(3), last_commit=2)))


def test_commit_that_the_tail_names_and_is_of_another_kind_is_an_error() -> None:
    journal = filled(MemoryStore(), 2)
    with pytest.raises(CheckpointError, match=journal_key(1)):
        journal.newest_commit(entry(2, last_commit=1))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"garbage",
        b"\xff",
        b"[]",
        b"null",
        b"{}",
        b'{"number": 2}',
        b'{"surprise": 1}',
    ],
)
def test_entry_that_is_garbage_is_an_error_naming_its_key(raw: bytes) -> None:
    store = MemoryStore()
    journal = filled(store, 1)
    store.put(journal_key(2), raw)
    with pytest.raises(CheckpointError, match=journal_key(2)):
        journal.read(2)
    with pytest.raises(CheckpointError, match=journal_key(2)):
        journal.tail()


@pytest.mark.parametrize(
    "change",
    [
        {"number": 3},
        {"kind": "commixted"},
        {"facts": {"step": 1}},
        {"last_commit": 1},
    ],
    ids=str,
)
def test_entry_that_contradicts_itself_is_an_error_naming_its_key(change: dict) -> None:
    store = MemoryStore()
    journal = filled(store, 1)
    journal.append(commit(2))
    store.put(journal_key(2), seal(unseal(store.get(journal_key(2))) | change))
    with pytest.raises(CheckpointError, match=journal_key(2)):
        journal.read(2)


def test_entry_with_any_byte_altered_is_an_error_or_the_same_entry() -> None:
    store = MemoryStore()
    filled(store, 1).append(commit(2))
    raw = store.get(journal_key(2))
    for at in range(len(raw)):
        store.put(journal_key(2), raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(CheckpointError, match=journal_key(2)):
            Journal(store).read(2)


def test_append_at_a_taken_number_raises_and_changes_nothing() -> None:
    store = MemoryStore()
    journal = filled(store, 3)
    with pytest.raises(ObjectExistsError):
        journal.append(entry(3, driver="other"))
    assert journal.read(3) == entry(3)
    assert store.get(JOURNAL_HINT_KEY) == b"3"


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_append_by_many_at_once_lets_exactly_one_in(tmp_path: Path, kind: str) -> None:
    store = MemoryStore() if kind == "memory" else LocalStore(str(tmp_path))
    for number in range(1, 6):
        winners: list[str] = []
        gate = threading.Barrier(6)

        def append(driver: str, number: int = number, gate: threading.Barrier = gate) -> None:
            gate.wait(20)
            try:
                Journal(store).append(entry(number, driver=driver))
            except ObjectExistsError:
                return
            winners.append(driver)  # noqa: B023 - joined below, within the iteration

        threads = [threading.Thread(target=append, args=(f"driver-{n}",)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        found = Journal(store).read(number)
        assert found is not None
        assert winners == [found.driver]
    assert [e.number for e in entries(store)] == [1, 2, 3, 4, 5]


def test_append_whose_reply_is_lost_stands_and_is_found() -> None:
    store = WatchedStore(
        MemoryStore(), Fault(operation="put", part=journal_key(2), times=1, after=True)
    )
    journal = filled(store, 3)
    assert journal.tail() == entry(3)


def test_append_that_never_arrived_raises_the_stores_error() -> None:
    store = WatchedStore(MemoryStore(), Fault(operation="put", part=journal_key(2), times=1))
    journal = filled(store, 1)
    with pytest.raises(StorageError, match="injected"):
        journal.append(entry(2))
    assert journal.tail() == entry(1)
    journal.append(entry(2))
    assert journal.tail() == entry(2)


def test_append_stands_although_the_hint_cannot_be_written() -> None:
    store = WatchedStore(MemoryStore(), Fault(operation="put", part=JOURNAL_HINT_KEY))
    journal = filled(store, 20)
    assert journal.tail() == entry(20)
