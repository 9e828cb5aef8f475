# SPDX-License-Identifier: Apache-2.0
"""Metrics rows for a store that cannot append: buffered, and put whole by a thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from raydist.clock import Clock, SystemClock
from raydist.errors import StorageError
from raydist.metrics.failures import StoreFailures
from raydist.metrics.rows import encode_row, segment_key
from raydist.storage.store import ObjectStore

FLUSH_EVERY_S = 5.0
SEGMENT_BYTES = 4 * 2**20
CLOSE_TIMEOUT_S = 150.0  # more than the 120 s over which a store retries by itself


@dataclass(kw_only=True, slots=True)
class _Segment:
    key: str
    lines: bytearray = field(default_factory=bytearray)
    saved_bytes: int = 0


class SegmentSink:
    """Keeps rows in memory and re-puts the growing object from one background thread.

    For stores that cannot append. A killed process loses at most the rows since the last put,
    about ``flush_every_s`` of them. A full segment is put a last time and the next one begun.
    """

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        *,
        flush_every_s: float = FLUSH_EVERY_S,
        segment_bytes: int = SEGMENT_BYTES,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        clock: Clock | None = None,
    ) -> None:
        """Start the thread.

        Args:
            store: Rooted at the run.
            key: First segment; no other process writes to it.
            flush_every_s: Time from the end of one flush to the next.
            segment_bytes: Size that a segment does not exceed, unless by its only row.
            close_timeout_s: How long ``close`` waits for the last flush.
            clock: When flushes are due; None is the machine's clock.
        """
        self._store = store
        self._key = key
        self._flush_every_s = flush_every_s
        self._segment_bytes = segment_bytes
        self._close_timeout_s = close_timeout_s
        self._clock = clock or SystemClock()
        self._failures = StoreFailures(key=key)
        # _wake guards everything below; it is never held during a put.
        self._wake = threading.Condition()
        self._segments = [_Segment(key=key)]  # those not wholly stored, and the one that grows
        self._num_segments = 1
        self._due_s = self._clock.monotonic_s() + flush_every_s
        self._is_flush_asked = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"metrics {key}", daemon=True)
        self._thread.start()

    @property
    def num_failures(self) -> int:
        """Flushes that the store refused so far."""
        return self._failures.num_failures

    def write(self, row: Mapping[str, object]) -> None:
        """Keep one row for the next flush; never waits for the store.

        Raises:
            ValueError: The row is not keyed, or the sink is closed.
            TypeError: A value is no JSON type.
        """
        line = encode_row(row)
        with self._wake:
            if self._is_closed:
                raise ValueError(f"metrics sink {self._key} is closed")
            segment = self._segments[-1]
            if segment.lines and len(segment.lines) + len(line) > self._segment_bytes:
                segment = _Segment(key=segment_key(self._key, self._num_segments))
                self._segments.append(segment)
                self._num_segments += 1
            segment.lines += line
            if self._clock.monotonic_s() >= self._due_s:
                self._wake.notify()

    def flush(self) -> None:
        """Have the thread store what is kept now; does not wait for it."""
        with self._wake:
            self._is_flush_asked = True
            self._wake.notify()

    def close(self) -> None:
        """Wait for a last flush and end the thread.

        Raises:
            StorageError: The last flush failed, or was not done after ``close_timeout_s``.
        """
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            raise StorageError(
                problem=f"The last metrics of {self._key} are not stored: the store has not "
                f"answered for {self._close_timeout_s:g} s."
            )
        self._failures.raise_last()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            with self._wake:
                while not (self._is_closed or self._is_flush_asked):
                    wait_s = self._due_s - self._clock.monotonic_s()
                    if wait_s <= 0:
                        break
                    self._wake.wait(wait_s)
                is_last = self._is_closed
                self._is_flush_asked = False
            self._save()
            with self._wake:
                self._due_s = self._clock.monotonic_s() + self._flush_every_s

    def _save(self) -> None:
        """Put each segment that has grown since its last put, oldest first, until one fails."""
        with self._wake:
            segments = list(self._segments)
        for segment in segments:
            with self._wake:
                data = bytes(segment.lines)
            if len(data) == segment.saved_bytes:
                continue
            try:
                self._store.put(segment.key, data)
            except Exception as error:  # whatever it is, it must not end the thread unheard
                self._failures.note(error)
                return
            segment.saved_bytes = len(data)
        self._failures.last = None
        with self._wake:
            *full, growing = self._segments
            unsaved = [s for s in full if len(s.lines) > s.saved_bytes]
            self._segments = [*unsaved, growing]
