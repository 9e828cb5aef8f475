# SPDX-License-Identifier: Apache-2.0
"""Which bytes of which objects a rank reads: a pure plan, and the verified reads it asks for."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from raydist.checkpoint.manifest import Manifest
from raydist.checkpoint.objects import DataObject, crc32c
from raydist.checkpoint.packing import Runs
from raydist.checkpoint.ranges import DTYPE_BYTES, WantedRange
from raydist.errors import CheckpointCorruptError, CheckpointError, ObjectMissingError
from raydist.storage import ObjectStore

logger = logging.getLogger(__name__)

_READERS = 4
_MAX_SPAN_BYTES = 16 << 20
"""A read of this and, where copies overlap its end, nearly twice as much; one for each reader is
all the memory that restoring takes beside the state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Bytes [start, start + length) of an object, to byte ``to`` of tensor ``key``'s buffer."""

    start: int
    length: int
    key: str
    to: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One ranged read of an object, on block boundaries, and what is copied out of it."""

    object_index: int
    start: int
    length: int
    copies: tuple[Copy, ...]


def plan_reads(manifest: Manifest, wanted: Iterable[WantedRange]) -> list[Span]:
    """Return the reads that give ``wanted``, coalesced per object.

    Pure. Each byte of state is read once; spans grow to whole blocks so that they can be
    verified.

    Raises:
        CheckpointError: The checkpoint has no such tensor, or of another shape or dtype; or a
            range is outside its tensor, or the second one of it.
    """
    copies: dict[int, list[Copy]] = defaultdict(list)
    seen: set[str] = set()
    for item in wanted:
        spec = item.spec
        _check(manifest, item)
        if spec.key in seen:
            raise CheckpointError(problem=f"{spec.key}: one rank wants two ranges of it.")
        seen.add(spec.key)
        width = DTYPE_BYTES[spec.dtype]
        ranges = Runs.of(manifest.ranges[spec.key])
        for index, stored in ranges.overlapping(item.offset, item.offset + item.length):
            first = max(item.offset, stored.offset)
            last = min(item.offset + item.length, stored.offset + stored.length)
            if first < last:
                copy = Copy(
                    start=stored.byte_start + (first - stored.offset) * width,
                    length=(last - first) * width,
                    key=spec.key,
                    to=(first - item.offset) * width,
                )
                copies[index] += _cut(copy, manifest.objects[index].block_bytes)
    spans: list[Span] = []
    for index in sorted(copies):
        spans += _spans(index, manifest.objects[index], copies[index])
    return spans


def _check(manifest: Manifest, item: WantedRange) -> None:
    spec = manifest.tensors.get(item.spec.key)
    if spec is None or spec != item.spec:
        there = f"{list(spec.shape)} {spec.dtype}" if spec else "not there"
        raise CheckpointError(
            problem=f"The model wants {item.spec.key} {list(item.spec.shape)} "
            f"{item.spec.dtype}; in the checkpoint of step {manifest.progress.step} it is "
            f"{there}.",
            way_out="Resume with the model that was saved, or choose another --name.",
        )
    if not 0 <= item.offset <= item.offset + item.length <= spec.numel:
        raise CheckpointError(
            problem=f"{spec.key}: the wanted range of {item.length} elements at {item.offset} is "
            f"not within its {spec.numel}."
        )


def _cut(copy: Copy, block_bytes: int) -> list[Copy]:
    """Split a copy on block boundaries, so that no read is larger than a span may be."""
    size = max(1, _MAX_SPAN_BYTES // block_bytes) * block_bytes
    pieces: list[Copy] = []
    at = copy.start
    end = copy.start + copy.length
    while at < end:
        stop = min(end, (at // size + 1) * size)
        pieces.append(Copy(start=at, length=stop - at, key=copy.key, to=copy.to + at - copy.start))
        at = stop
    return pieces


def _spans(index: int, info: DataObject, copies: Sequence[Copy]) -> list[Span]:
    spans: list[Span] = []
    group: list[Copy] = []
    group_end = 0
    block = info.block_bytes
    for copy in sorted(copies, key=lambda c: c.start):
        starts_apart = copy.start // block * block > group_end
        if group and (starts_apart or group_end - group[0].start >= _MAX_SPAN_BYTES):
            spans.append(_span(index, info, group, group_end))
            group = []
        group.append(copy)
        group_end = max(group_end, copy.start + copy.length)
    if group:
        spans.append(_span(index, info, group, group_end))
    return spans


def _span(index: int, info: DataObject, copies: list[Copy], end: int) -> Span:
    block = info.block_bytes
    start = copies[0].start // block * block
    stop = min(info.bytes, -(-end // block) * block)
    return Span(object_index=index, start=start, length=stop - start, copies=tuple(copies))


def read_spans(
    store: ObjectStore, manifest: Manifest, spans: Sequence[Span], buffers: dict[str, memoryview]
) -> int:
    """Read ``spans`` in parallel, verify every block, and put the bytes into ``buffers``.

    A span that is all of one tensor's goes straight into its buffer, others through memory that
    each reader reuses.

    Returns:
        Bytes read.

    Raises:
        CheckpointCorruptError: An object is missing, short, or a block's checksum differs.
    """
    scratch = threading.local()

    def one(span: Span) -> int:
        info = manifest.objects[span.object_index]
        direct = _destination(span, buffers)
        if direct is not None:
            _fill_verified(store, info, span.start, direct)
            return span.length
        if not hasattr(scratch, "data"):
            scratch.data = memoryview(bytearray(max(span.length for span in spans)))
        data = scratch.data[: span.length]
        _fill_verified(store, info, span.start, data)
        for copy in span.copies:
            at = copy.start - span.start
            buffers[copy.key][copy.to : copy.to + copy.length] = data[at : at + copy.length]
        return span.length

    with ThreadPoolExecutor(_READERS) as pool:
        return sum(pool.map(one, spans))


def _destination(span: Span, buffers: dict[str, memoryview]) -> memoryview | None:
    """Return where the whole span goes, or None when it is for several places."""
    if len(span.copies) != 1 or span.copies[0].length != span.length:
        return None
    copy = span.copies[0]
    return buffers[copy.key][copy.to : copy.to + copy.length]


def _fill_verified(store: ObjectStore, info: DataObject, start: int, into: memoryview) -> None:
    """Read ``into`` from block boundary ``start`` on; bytes altered on their way, once more.

    Raises:
        CheckpointCorruptError: The object is missing, short, or altered where it lies.
    """
    bad = None
    for _ in range(2):
        try:
            count = store.get(info.key, start=start, into=into)
        except ObjectMissingError as error:
            raise CheckpointCorruptError(key=info.key, reason="the object is missing") from error
        if count != into.nbytes:
            raise CheckpointCorruptError(
                key=info.key,
                reason=f"{count} bytes at {start} where {into.nbytes} are due "
                f"({info.bytes} in all)",
            )
        before, bad = bad, _first_bad_block(info, start, into)
        if bad is None:
            if before is not None:
                logger.warning("checkpoint: bytes of %s came altered, then right", info.key)
            return
    raise CheckpointCorruptError(
        key=info.key,
        reason=f"block {bad} (bytes from {(bad or 0) * info.block_bytes}) does not match its "
        "CRC32C",
    )


def _first_bad_block(info: DataObject, start: int, data: memoryview) -> int | None:
    first = start // info.block_bytes
    for at in range(0, data.nbytes, info.block_bytes):
        number = first + at // info.block_bytes
        if crc32c(data[at : at + info.block_bytes]) != info.blocks[number]:
            return number
    return None


def verify_object(store: ObjectStore, info: DataObject) -> None:
    """Read one object whole and check every block, several reads at a time.

    Raises:
        CheckpointCorruptError: It is missing, of another size, or altered.
    """
    size = store.size(info.key)
    if size is None:
        raise CheckpointCorruptError(key=info.key, reason="the object is missing")
    if size != info.bytes:
        raise CheckpointCorruptError(key=info.key, reason=f"{size} bytes, {info.bytes} committed")
    per_read = max(1, _MAX_SPAN_BYTES // info.block_bytes) * info.block_bytes
    scratch = threading.local()

    def check(start: int) -> None:
        if not hasattr(scratch, "data"):
            scratch.data = memoryview(bytearray(min(per_read, info.bytes)))
        _fill_verified(store, info, start, scratch.data[: info.bytes - start])

    with ThreadPoolExecutor(_READERS) as pool:
        deque(pool.map(check, range(0, info.bytes, per_read)), maxlen=0)
