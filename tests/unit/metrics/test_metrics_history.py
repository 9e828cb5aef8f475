# SPDX-License-Identifier: Apache-2.0
"""Reading back what attempts left in a real directory, whole or torn."""

from __future__ import annotations

from pathlib import Path

import pytest

from raydist.errors import StorageError
from raydist.metrics.history import merge, read_history
from raydist.metrics.rows import attempt_key
from raydist.metrics.sink import open_sink
from raydist.storage.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path))


def _train(store: LocalStore, *, attempt: int, steps: range) -> None:
    sink = open_sink(store, attempt=attempt)
    for step in steps:
        sink.write({"attempt": attempt, "step": step, "loss": attempt + step / 100})
    sink.close()


def test_a_run_without_metrics_has_an_empty_history(store: LocalStore) -> None:
    history = read_history(store)
    assert (history.rows, history.num_torn_lines) == ([], 0)
    assert merge([]).rows == []


def test_a_restart_keeps_the_rows_of_both_attempts(store: LocalStore) -> None:
    """The case of ray-project/ray#41668: killed after step 7 with a checkpoint at 5."""
    _train(store, attempt=1, steps=range(1, 8))
    _train(store, attempt=2, steps=range(6, 11))
    history = read_history(store)
    keys = [(row["attempt"], row["step"]) for row in history.rows]
    assert keys == [(1, s) for s in range(1, 8)] + [(2, s) for s in range(6, 11)]
    merged = merge(history.rows)
    assert [row["step"] for row in merged.rows] == list(range(1, 11))
    assert [row["attempt"] for row in merged.rows] == [1] * 5 + [2] * 5
    assert merged.repeated_steps == [6, 7]


def test_the_newest_attempt_wins_in_any_order_of_rows() -> None:
    rows = [{"attempt": 2, "step": 1}, {"attempt": 3, "step": 1}, {"attempt": 1, "step": 1}]
    merged = merge(rows)
    assert merged.rows == [{"attempt": 3, "step": 1}]
    assert merged.repeated_steps == [1]


def test_two_rows_of_one_attempt_are_no_repetition() -> None:
    rows = [{"attempt": 1, "step": 1, "a": 1}, {"attempt": 1, "step": 1, "a": 2}]
    merged = merge(rows)
    assert merged.rows == [rows[1]]
    assert merged.repeated_steps == []


def test_segments_are_read_in_order_and_other_files_left_alone(store: LocalStore) -> None:
    store.append("metrics/attempt-0002.0001.jsonl", b'{"attempt":2,"step":2}\n')
    store.append("metrics/attempt-0002.jsonl", b'{"attempt":2,"step":1}\n')
    store.append("metrics/attempt-10000.jsonl", b'{"attempt":10000,"step":1}\n')
    store.append("metrics/attempt-0001.jsonl.bak", b"no row\n")
    keys = [(row["attempt"], row["step"]) for row in read_history(store).rows]
    assert keys == [(2, 1), (2, 2), (10_000, 1)]


@pytest.mark.parametrize("tail", [b'{"attempt":1,"st', b"\0\0\0", b'{"attempt":1,"st\n'])
def test_one_torn_last_line_in_each_segment_is_counted(store: LocalStore, tail: bytes) -> None:
    for attempt in (1, 2):
        _train(store, attempt=attempt, steps=range(1, 4))
        store.append(attempt_key(attempt), tail)
    history = read_history(store)
    assert len(history.rows) == 6
    assert history.num_torn_lines == 2


def test_a_whole_row_that_only_lacks_its_newline_is_read(store: LocalStore) -> None:
    store.append(attempt_key(1), b'{"attempt":1,"step":1}\n{"attempt":1,"step":2}')
    history = read_history(store)
    assert ([row["step"] for row in history.rows], history.num_torn_lines) == ([1, 2], 0)


def test_a_damaged_line_inside_a_segment_is_an_error(store: LocalStore) -> None:
    store.append(attempt_key(1), b'{"attempt":1,"st\n{"attempt":1,"step":2}\n')
    with pytest.raises(StorageError, match=r"attempt-0001\.jsonl line 1 of 2"):
        read_history(store)


def test_rows_that_were_stored_twice_are_read_once(store: LocalStore) -> None:
    both = b'{"attempt":1,"step":1,"loss":2.0}\n{"attempt":1,"step":1,"saved":true}\n'
    store.append("metrics/attempt-0001.jsonl", both)
    store.append("metrics/attempt-0001.0001.jsonl", both)
    assert len(read_history(store).rows) == 2
