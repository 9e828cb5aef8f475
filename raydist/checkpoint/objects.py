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

from raydist.checkpoint.ranges import DTYPE_BYTES, LocalRange
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


def encode(ranges: Sequence[LocalRange]) -> tuple[bytearray, dict[str, StoredRange]]:
    """Lay ranges out as one safetensors file.

    Returns:
        The file, and for each tensor key where its range lies in it.

    Raises:
        CheckpointError: A buffer is not of its range's size, or a tensor has two ranges.
    """
    _check(ranges)
    entries: dict[str, dict[str, object]] = {}
    start = 0
    for item in ranges:
        end = start + item.data.nbytes
        entries[f"{item.spec.key}@{item.offset}"] = {
            "dtype": item.spec.dtype,
            "shape": [item.length],
            "data_offsets": [start, end],
        }
        start = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % 8)
    out = bytearray(8 + len(header) + start)
    out[:8] = len(header).to_bytes(8, "little")
    out[8 : 8 + len(header)] = header
    stored: dict[str, StoredRange] = {}
    at = 8 + len(header)
    for item in ranges:
        out[at : at + item.data.nbytes] = item.data
        stored[item.spec.key] = StoredRange(offset=item.offset, length=item.length, byte_start=at)
        at += item.data.nbytes
    return out, stored


def _check(ranges: Sequence[LocalRange]) -> None:
    seen: set[str] = set()
    for item in ranges:
        key, due = item.spec.key, item.length * DTYPE_BYTES[item.spec.dtype]
        if item.data.nbytes != due:
            raise CheckpointError(
                problem=f"{key}: the range of {item.length} {item.spec.dtype} elements at "
                f"{item.offset} takes {due} bytes; its buffer has {item.data.nbytes}."
            )
        if key in seen:
            raise CheckpointError(problem=f"{key}: one rank saves two ranges of it.")
        seen.add(key)


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
    starts = range(0, len(view), block_bytes)
    blocks = array("I", (crc32c(view[at : at + block_bytes]) for at in starts))
    return DataObject(
        key=key,
        bytes=len(view),
        crc32c=crc32c(view),
        block_bytes=block_bytes,
        blocks=blocks,
    )
