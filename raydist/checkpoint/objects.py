# SPDX-License-Identifier: Apache-2.0
"""Data objects: safetensors files of 1-D ranges, with checksums of every block.

Encoded here rather than by the safetensors package because the manifest needs each range's
byte span in the file; the package reads the result (a test holds that).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from awscrt import checksums

from raydist.checkpoint.ranges import LocalRange, WantedRange
from raydist.errors import CheckpointError

_MIN_BLOCK_BYTES = 1 << 14
_MAX_BLOCK_BYTES = 1 << 16
"""What a resharded read wastes at most at each end of a range; docs/benchmarks.md has figures."""
_MAX_BLOCKS = 4096
"""Of blocks smaller than that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRange:
    """Where one range lies: element offset and length, and its first byte in the object."""

    offset: int
    length: int
    byte_start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DataObject:
    """One object as the manifest records it.

    Fields:
        crc32c: Of the whole object.
        block_bytes, blocks: CRC32C of each ``block_bytes`` of it, the last one short, so that
            a read of a range can be verified without reading the rest.
    """

    key: str
    bytes: int
    crc32c: int
    block_bytes: int
    blocks: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a rank's ranges lie in its object.

    Fields:
        header: The object's first bytes, up to the first range.
        ranges: What lies in it, in order.
        stored: Where, by tensor key.
        bytes: Size of the object.
    """

    header: bytes
    ranges: tuple[WantedRange, ...]
    stored: dict[str, StoredRange]
    bytes: int

    def views(self, data: memoryview) -> dict[str, memoryview]:
        """Return the part of ``data``, the whole object, that each tensor key has."""
        views = {}
        for item in self.ranges:
            start = self.stored[item.spec.key].byte_start
            views[item.spec.key] = data[start : start + item.nbytes]
        return views


def lay_out(ranges: Sequence[WantedRange]) -> Layout:
    """Lay ranges out as one safetensors file, in the order given. Pure.

    Raises:
        CheckpointError: A tensor has two ranges.
    """
    entries: dict[str, dict[str, object]] = {}
    starts: dict[str, int] = {}
    end = 0
    for item in ranges:
        key = item.spec.key
        if key in starts:
            raise CheckpointError(problem=f"{key}: one rank saves two ranges of it.")
        starts[key] = end
        end += item.nbytes
        entries[f"{key}@{item.offset}"] = {
            "dtype": item.spec.dtype,
            "shape": [item.length],
            "data_offsets": [starts[key], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 8)
    header = len(text).to_bytes(8, "little") + text
    return Layout(
        header=header,
        ranges=tuple(ranges),
        stored={
            item.spec.key: StoredRange(
                offset=item.offset,
                length=item.length,
                byte_start=len(header) + starts[item.spec.key],
            )
            for item in ranges
        },
        bytes=len(header) + end,
    )


def encode(ranges: Sequence[LocalRange]) -> tuple[bytearray, dict[str, StoredRange]]:
    """Lay ranges out as one safetensors file.

    Returns:
        The file, and for each tensor key where its range lies in it.

    Raises:
        CheckpointError: A buffer is not of its range's size, or a tensor has two ranges.
    """
    layout = lay_out([WantedRange(spec=r.spec, offset=r.offset, length=r.length) for r in ranges])
    out = bytearray(layout.bytes)
    out[: len(layout.header)] = layout.header
    for item, due in zip(ranges, layout.ranges, strict=True):
        if item.data.nbytes != due.nbytes:
            raise CheckpointError(
                problem=f"{item.spec.key}: the range of {item.length} {item.spec.dtype} elements "
                f"at {item.offset} takes {due.nbytes} bytes; its buffer has {item.data.nbytes}."
            )
        start = layout.stored[item.spec.key].byte_start
        out[start : start + due.nbytes] = item.data
    return out, layout.stored


def crc32c(data: bytes | bytearray | memoryview) -> int:
    """Return the CRC32C of any buffer, without a copy."""
    # awscrt reads every buffer, but declares bytes only.
    return checksums.crc32c(data)  # pyright: ignore[reportArgumentType]


def describe(key: str, data: bytes | bytearray | memoryview) -> DataObject:
    """Return the manifest's record of an object, checksums computed over ``data``."""
    view = memoryview(data)
    block_bytes = _MIN_BLOCK_BYTES
    while block_bytes < _MAX_BLOCK_BYTES and len(view) > block_bytes * _MAX_BLOCKS:
        block_bytes *= 2
    blocks = array("I")
    whole = 0
    for at in range(0, len(view), block_bytes):
        block = view[at : at + block_bytes]
        blocks.append(crc32c(block))
        # Combining costs nothing; a second pass over the bytes would double the work.
        whole = checksums.combine_crc32c(whole, blocks[-1], len(block))
    return DataObject(
        key=key,
        bytes=len(view),
        crc32c=whole,
        block_bytes=block_bytes,
        blocks=tuple(blocks),
    )
