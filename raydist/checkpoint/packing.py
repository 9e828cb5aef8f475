# SPDX-License-Identifier: Apache-2.0
"""The two long columns of a manifest in few characters: block checksums and ranges."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import overload

from raydist.checkpoint.objects import StoredRange

Range = tuple[int, StoredRange]
"""(object index, range in it)."""


def pack_blocks(blocks: Sequence[int]) -> str:
    """Return the checksums as base64 of little-endian 32-bit numbers."""
    numbers = array("I", blocks)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers).decode()


def unpack_blocks(packed: str) -> array[int]:
    """Read ``pack_blocks`` back.

    Raises:
        ValueError: Not base64, or not of whole numbers.
    """
    numbers = array("I")
    numbers.frombytes(base64.b64decode(packed, validate=True))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


class Runs(Sequence[Range]):
    """The ranges of one tensor, equal slices over many ranks in the memory of one.

    Args:
        runs: [object index, offset, length, byte_start, count] each: ``count`` ranges of
            ``length`` elements that follow each other, in as many consecutive objects, each at
            the same byte.

    Raises:
        ValueError: A run is not five numbers.
    """

    def __init__(self, runs: list[list[int]]) -> None:
        self.runs = [(index, at, length, start, count) for index, at, length, start, count in runs]

    @classmethod
    def of(cls, ranges: Sequence[Range]) -> Runs:
        """Return ``ranges`` as runs."""
        return ranges if isinstance(ranges, Runs) else cls(_find_runs(ranges))

    def overlapping(self, first: int, last: int) -> Iterator[Range]:
        """Yield the ranges that hold some of the elements [first, last)."""
        for index, offset, length, start, count in self.runs:
            if length:
                begin = max(0, (first - offset) // length)
                end = min(count, -((offset - last) // length))
                yield from _expand(index, offset, length, start, range(begin, end))

    def __iter__(self) -> Iterator[Range]:
        for index, offset, length, start, count in self.runs:
            yield from _expand(index, offset, length, start, range(count))

    def __len__(self) -> int:
        return sum(run[-1] for run in self.runs)

    @overload
    def __getitem__(self, at: int) -> Range: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[Range, ...]: ...

    def __getitem__(self, at: int | slice) -> Range | tuple[Range, ...]:
        return tuple(self)[at]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _expand(index: int, offset: int, length: int, start: int, numbers: range) -> Iterator[Range]:
    for n in numbers:
        yield index + n, StoredRange(offset=offset + n * length, length=length, byte_start=start)


def _find_runs(ranges: Sequence[Range]) -> list[list[int]]:
    runs: list[list[int]] = []
    due = None
    for index, stored in ranges:
        if (index, stored.offset, stored.length, stored.byte_start) == due:
            runs[-1][4] += 1
        else:
            runs.append([index, stored.offset, stored.length, stored.byte_start, 1])
        due = (index + 1, stored.offset + stored.length, stored.length, stored.byte_start)
    return runs
