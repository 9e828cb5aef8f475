# SPDX-License-Identifier: Apache-2.0
"""Sinks over a real directory, and over stores in memory that fail or block.

Faked: the object store's failures, and the clock that says when a flush is due. Real: files,
processes, the background thread.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from raydist.errors import StorageError
from raydist.metrics.history import read_history
from raydist.metrics.sink import AppendSink, SegmentSink, open_sink
from raydist.storage.local import LocalStore
from raydist.testing.fake_clock import FakeClock
from raydist.testing.memory_store import MemoryStore

KEY = "metrics/attempt-0001.jsonl"
LIMIT_S = 30.0  # how long a test waits for a thread before it calls it hung


def _row(step: int, **values: object) -> dict[str, object]:
    return {"attempt": 1, "step": step, **values}


def _steps(store: LocalStore | MemoryStore) -> list[int]:
    return [row["step"] for row in read_history(store).rows]


class FlakyStore(MemoryStore):
    """Refuses the puts it is told to; says when each put is done."""

    def __init__(self, *, num_failures: int) -> None:
        super().__init__()
        self.failures_left = num_failures
        self.put_done = threading.Semaphore(0)
        self.keys: list[str] = []

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        try:
            if self.failures_left:
                self.failures_left -= 1
                raise StorageError(problem="503 slow down")
            super().put(key, data, if_absent=if_absent)
            self.keys.append(key)
        finally:
            self.put_done.release()

    def wait_for_put(self) -> None:
        assert self.put_done.acquire(timeout=LIMIT_S)


class BlockedStore(MemoryStore):
    """Answers no put until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = threading.Event()
        self.put_begun = threading.Event()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        self.put_begun.set()
        assert self.is_open.wait(LIMIT_S)
        super().put(key, data, if_absent=if_absent)


class TornStore(LocalStore):
    """Writes half of some appends and then reports a full disk, or all and then an I/O error."""

    def __init__(self, root: str, *, written_shares: list[float]) -> None:
        super().__init__(root)
        self.written_shares = written_shares

    def append(self, key: str, data: bytes) -> None:
        if not self.written_shares:
            super().append(key, data)
            return
        share = self.written_shares.pop(0)
        if share:
            super().append(key, data[: int(len(data) * share)])
        raise StorageError(problem="no space left")


def test_open_sink_appends_where_the_store_can(tmp_path: Path) -> None:
    sink = open_sink(LocalStore(str(tmp_path)), attempt=3)
    assert isinstance(sink, AppendSink)
    sink.write({"attempt": 3, "step": 1})
    assert (tmp_path / "metrics/attempt-0003.jsonl").read_text() == '{"attempt":3,"step":1}\n'


def test_open_sink_puts_segments_where_it_cannot() -> None:
    store = MemoryStore()
    sink = open_sink(store, attempt=3)
    assert isinstance(sink, SegmentSink)
    sink.write({"attempt": 3, "step": 1})
    sink.close()
    assert store.get("metrics/attempt-0003.jsonl") == b'{"attempt":3,"step":1}\n'


def test_a_killed_process_loses_no_appended_row(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from raydist.metrics.sink import open_sink\n"
        "from raydist.storage.local import LocalStore\n"
        "sink = open_sink(LocalStore(sys.argv[1]), attempt=1)\n"
        "for step in range(1, 51):\n"
        "    sink.write({'attempt': 1, 'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[3]
    process = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(root)},
        timeout=LIMIT_S,
        check=False,
    )
    assert process.returncode == -signal.SIGKILL
    assert _steps(LocalStore(str(tmp_path))) == list(range(1, 51))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids=["nothing", "half", "all"])
def test_an_append_that_fails_after_writing_a_part_costs_no_row(
    tmp_path: Path, share: float
) -> None:
    store = TornStore(str(tmp_path), written_shares=[share, share])
    sink = AppendSink(store, KEY)
    for step in range(1, 6):
        sink.write(_row(step))
    sink.close()
    assert sink.num_failures == 2
    assert _steps(store) == [1, 2, 3, 4, 5]


def test_an_append_sink_raises_at_close_what_it_could_not_store(tmp_path: Path) -> None:
    store = TornStore(str(tmp_path), written_shares=[0.0] * 10)
    sink = AppendSink(store, KEY)
    sink.write(_row(1))
    with pytest.raises(StorageError, match="after 2 failures: no space left"):
        sink.close()


@pytest.mark.parametrize("store", ["append", "segments"])
def test_a_closed_sink_takes_no_row_and_closes_again(tmp_path: Path, store: str) -> None:
    appends = store == "append"
    sink = open_sink(LocalStore(str(tmp_path)) if appends else MemoryStore(), attempt=1)
    sink.close()
    sink.close()
    with pytest.raises(ValueError, match="closed"):
        sink.write(_row(1))


def test_a_flush_comes_when_the_clock_says_so() -> None:
    store, clock = FlakyStore(num_failures=0), FakeClock()
    sink = SegmentSink(store, KEY, flush_every_s=5.0, clock=clock)
    sink.write(_row(1))
    clock.sleep(4.9)
    sink.write(_row(2))
    assert not store.keys
    clock.sleep(0.1)
    sink.write(_row(3))
    store.wait_for_put()
    assert _steps(store) == [1, 2, 3]
    sink.close()


def test_a_store_that_fails_and_heals_costs_no_row() -> None:
    store = FlakyStore(num_failures=3)
    sink = SegmentSink(store, KEY, clock=FakeClock())
    for step in range(1, 5):
        sink.write(_row(step))
        sink.flush()
        store.wait_for_put()
    sink.close()
    assert sink.num_failures == 3
    assert _steps(store) == [1, 2, 3, 4]


def test_any_exception_of_the_store_is_kept_and_tried_again() -> None:
    class BrokenOnce(FlakyStore):
        def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
            if self.failures_left:
                self.failures_left -= 1
                self.put_done.release()
                raise RuntimeError("a library's own error")
            super().put(key, data, if_absent=if_absent)

    store = BrokenOnce(num_failures=1)
    sink = SegmentSink(store, KEY, clock=FakeClock())
    sink.write(_row(1))
    sink.flush()
    store.wait_for_put()
    sink.close()
    assert (sink.num_failures, _steps(store)) == (1, [1])


def test_close_raises_when_the_last_flush_fails() -> None:
    store = FlakyStore(num_failures=1000)
    sink = SegmentSink(store, KEY, clock=FakeClock())
    sink.write(_row(1))
    with pytest.raises(StorageError, match="after 1 failures: 503 slow down") as caught:
        sink.close()
    assert isinstance(caught.value.__cause__, StorageError)


def test_writing_never_waits_for_the_store() -> None:
    store = BlockedStore()
    sink = SegmentSink(store, KEY, segment_bytes=2000, clock=FakeClock())
    sink.write(_row(1))
    sink.flush()
    assert store.put_begun.wait(LIMIT_S)
    for step in range(2, 1001):  # returns although the put has not: the store opens below
        sink.write(_row(step))
        sink.flush()
    assert list(store.list("")) == []
    store.is_open.set()
    sink.close()
    assert _steps(store) == list(range(1, 1001))


def test_close_gives_up_on_a_store_that_does_not_answer() -> None:
    store = BlockedStore()
    sink = SegmentSink(store, KEY, close_timeout_s=0.05, clock=FakeClock())
    sink.write(_row(1))
    with pytest.raises(StorageError, match=r"has not answered for 0\.05 s"):
        sink.close()
    store.is_open.set()


def test_full_segments_roll_over_and_are_put_no_more() -> None:
    store = FlakyStore(num_failures=0)
    line_bytes = len(b'{"attempt":1,"step":1}\n')
    sink = SegmentSink(store, KEY, segment_bytes=2 * line_bytes, clock=FakeClock())
    for step in range(1, 6):
        sink.write(_row(step))
    sink.flush()
    for _ in range(3):
        store.wait_for_put()
    sink.write(_row(6))
    sink.close()
    second, third = "metrics/attempt-0001.0001.jsonl", "metrics/attempt-0001.0002.jsonl"
    assert store.keys == [KEY, second, third, third]
    assert [size for _, size in store.list("metrics/")] == [2 * line_bytes] * 3
    assert _steps(store) == [1, 2, 3, 4, 5, 6]


def test_a_row_larger_than_a_segment_gets_one_of_its_own() -> None:
    store = MemoryStore()
    sink = SegmentSink(store, KEY, segment_bytes=10, clock=FakeClock())
    sink.write(_row(1))
    sink.write(_row(2))
    sink.close()
    assert len(list(store.list("metrics/"))) == 2
    assert _steps(store) == [1, 2]


def test_nothing_written_puts_nothing() -> None:
    store = MemoryStore()
    sink = SegmentSink(store, KEY, clock=FakeClock())
    sink.flush()
    sink.close()
    assert list(store.list("")) == []
