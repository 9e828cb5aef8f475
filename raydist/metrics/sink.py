# SPDX-License-Identifier: Apache-2.0
"""Where the numbers of every step go: one line per row, keys of their own for each attempt.

No attempt writes to another's keys, so a restart never replaces what an earlier life has left
(ray-project/ray#41668). No sink ends the run: what a store refuses is kept and tried again, and
only ``close`` raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from raydist.clock import Clock
from raydist.errors import StorageError
from raydist.metrics.failures import StoreFailures
from raydist.metrics.rows import attempt_key, encode_row, segment_key
from raydist.metrics.segment_sink import FLUSH_EVERY_S, SEGMENT_BYTES, SegmentSink
from raydist.storage.store import ObjectStore


class MetricSink(Protocol):
    """Takes the rows of one attempt; called from one thread."""

    def write(self, row: Mapping[str, object]) -> None:
        """Take one row, which carries ``attempt`` and ``step``; no store error comes out.

        Raises:
            ValueError: The row is not keyed, or the sink is closed.
            TypeError: A value is no JSON type.
        """
        ...

    def flush(self) -> None:
        """Have what is kept stored soon; does not wait for it."""
        ...

    def close(self) -> None:
        """Store what is kept and end; a second call does nothing new.

        Raises:
            StorageError: Rows could not be stored.
        """
        ...


@runtime_checkable
class AppendStore(Protocol):
    """A store that can add to the end of an object."""

    def append(self, key: str, data: bytes) -> None:
        """Add ``data`` to the object, creating it if there is none."""
        ...


class AppendSink:
    """Appends each row as it comes: a SIGKILL loses none.

    After a failed append the next try goes to a new segment: part of the data may have been
    written, and only the last line of a segment may be torn. Rows that turn out to be stored
    twice are equal, and the reader drops one.
    """

    def __init__(self, store: AppendStore, key: str) -> None:
        """Write nothing yet.

        Args:
            store: Rooted at the run.
            key: First segment; no other process writes to it.
        """
        self._store = store
        self._key = key
        self._segment = 0
        self._unsaved = bytearray()
        self._failures = StoreFailures(key=key)
        self._is_closed = False

    @property
    def num_failures(self) -> int:
        """Appends that the store refused so far."""
        return self._failures.num_failures

    def write(self, row: Mapping[str, object]) -> None:
        """Append one row.

        Raises:
            ValueError: The row is not keyed, or the sink is closed.
            TypeError: A value is no JSON type.
        """
        if self._is_closed:
            raise ValueError(f"metrics sink {self._key} is closed")
        self._unsaved += encode_row(row)
        self.flush()

    def flush(self) -> None:
        """Append what an earlier failure has left."""
        if not self._unsaved:
            return
        try:
            self._store.append(segment_key(self._key, self._segment), bytes(self._unsaved))
        except StorageError as error:
            self._failures.note(error)
            self._segment += 1
        else:
            self._unsaved.clear()
            self._failures.last = None

    def close(self) -> None:
        """Append what is left and end.

        Raises:
            StorageError: Rows could not be stored.
        """
        self._is_closed = True
        self.flush()
        self._failures.raise_last()


def open_sink(
    store: ObjectStore,
    *,
    attempt: int,
    flush_every_s: float = FLUSH_EVERY_S,
    segment_bytes: int = SEGMENT_BYTES,
    clock: Clock | None = None,
) -> MetricSink:
    """Return the sink of an attempt that suits the store: appending where it can.

    Args:
        store: Rooted at the run.
        attempt: Number that no other process of this run writes under.
        flush_every_s: Time between puts, where the store cannot append.
        segment_bytes: Size at which a new object is begun, where the store cannot append.
        clock: When flushes are due; None is the machine's clock.
    """
    key = attempt_key(attempt)
    if isinstance(store, AppendStore):
        return AppendSink(store, key)
    return SegmentSink(
        store, key, flush_every_s=flush_every_s, segment_bytes=segment_bytes, clock=clock
    )
