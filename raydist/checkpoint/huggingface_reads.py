# SPDX-License-Identifier: Apache-2.0
"""A rank's ranges out of a Hugging Face directory: a pure plan, and the windowed reads of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from raydist.checkpoint.float_bits import FLOATS, from_float32, to_float32
from raydist.checkpoint.huggingface_files import StoredTensor
from raydist.checkpoint.ranges import DTYPE_BYTES, WantedRange
from raydist.errors import CheckpointCorruptError, CheckpointError, ObjectMissingError
from raydist.storage import ObjectStore

WINDOW_BYTES = 64 << 20
"""Ranges on their way and not yet taken, together; a single larger range comes alone."""
READ_BYTES = 8 << 20
"""One request at most."""

_READERS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """Elements [offset, offset + count) of a stored tensor, in one request.

    Fields:
        byte_start: Of the first of them, in the file.
        to: Index of the first of them in the rank's range.
    """

    byte_start: int
    offset: int
    count: int
    to: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeReads:
    """All reads of one range.

    Fields:
        length: Elements that the directory gives, from the range's first one on; fewer than the
            range has where the model's tensor has more rows.
    """

    key: str
    dtype: str
    length: int
    source: StoredTensor
    reads: tuple[Read, ...]


def plan_weight_reads(
    sources: dict[str, StoredTensor],
    wanted: Iterable[WantedRange],
    *,
    read_bytes: int = READ_BYTES,
) -> list[RangeReads]:
    """Return the reads that give ``wanted``, in its order. Pure.

    Ranges without a source, and those that lie in added rows alone, are not among them. Each
    element is read once, and nothing else is.

    Args:
        sources: By tensor key.
        wanted: The rank's ranges.
        read_bytes: Largest request.
    """
    planned: list[RangeReads] = []
    for item in wanted:
        source = sources.get(item.spec.key)
        if source is None:
            continue
        end = min(item.offset + item.length, source.numel)
        if end <= item.offset:
            continue
        width = DTYPE_BYTES[source.dtype]
        step = max(1, read_bytes // width)
        reads = tuple(
            Read(
                byte_start=source.byte_start + at * width,
                offset=at,
                count=min(step, end - at),
                to=at - item.offset,
            )
            for at in range(item.offset, end, step)
        )
        planned.append(
            RangeReads(
                key=item.spec.key,
                dtype=item.spec.dtype,
                length=end - item.offset,
                source=source,
                reads=reads,
            )
        )
    return planned


def read_weights(
    store: ObjectStore, planned: Sequence[RangeReads], *, window_bytes: int = WINDOW_BYTES
) -> Generator[tuple[str, memoryview], None, None]:
    """Yield (tensor key, its range as bytes of the model's dtype) in the order of the plan.

    Later ranges are read while the caller works on one, as far as ``window_bytes`` allow.

    Args:
        store: Rooted at the directory.
        planned: What to read.
        window_bytes: Ranges begun and not yet taken.

    Raises:
        CheckpointCorruptError: A file is missing, became shorter, or has a value that is not
            finite.
        StorageError: The store failed.
    """
    begun: deque[tuple[RangeReads, np.ndarray[Any, Any], list[Future[None]]]] = deque()
    begun_bytes = 0
    remaining = deque(planned)
    pool = ThreadPoolExecutor(_READERS, "raydist-weights")
    try:
        while begun or remaining:
            while remaining and (
                not begun or begun_bytes + _num_bytes(remaining[0]) <= window_bytes
            ):
                item = remaining.popleft()
                # Untouched pages cost nothing until a read fills them.
                out = np.empty(_num_bytes(item), np.uint8)
                begun_bytes += out.nbytes
                futures = [pool.submit(_reading(store, item, read, out)) for read in item.reads]
                begun.append((item, out, futures))
            item, out, futures = begun.popleft()
            for future in futures:
                future.result()
            yield item.key, out.data
            begun_bytes -= out.nbytes
            del out, futures
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _num_bytes(item: RangeReads) -> int:
    return item.length * DTYPE_BYTES[item.dtype]


def _reading(
    store: ObjectStore, item: RangeReads, read: Read, out: np.ndarray[Any, Any]
) -> Callable[[], None]:
    def run() -> None:
        source, width = item.source, DTYPE_BYTES[item.dtype]
        data = _get(store, source, read)
        into = out[read.to * width : (read.to + read.count) * width]
        if source.dtype not in FLOATS:
            if source.dtype != item.dtype:
                raise CheckpointError(
                    problem=f"{source.name} is {source.dtype} there; the model's is {item.dtype}."
                )
            into[:] = np.frombuffer(data, np.uint8)
            return
        values = to_float32(data, source.dtype)
        if not np.isfinite(values).all():
            first = read.offset + int(np.argmin(np.isfinite(values)))
            raise CheckpointCorruptError(
                key=source.file, reason=f"element {first} of {source.name} is not finite"
            )
        into[:] = values.view(np.uint8) if item.dtype == "F32" else from_float32(values, item.dtype)

    return run


def _get(store: ObjectStore, source: StoredTensor, read: Read) -> bytes:
    due = read.count * DTYPE_BYTES[source.dtype]
    try:
        data = store.get(source.file, start=read.byte_start, length=due)
    except ObjectMissingError as error:
        raise CheckpointCorruptError(key=source.file, reason="the file is missing") from error
    if len(data) != due:
        raise CheckpointCorruptError(
            key=source.file,
            reason=f"{len(data)} bytes at {read.byte_start} where {due} of {source.name} are due",
        )
    return data
