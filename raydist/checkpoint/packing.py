# SPDX-License-Identifier: Apache-2.0
"""The two long columns of a manifest in few characters: block checksums and ranges."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence

from raydist.checkpoint.objects import StoredRange

Ranges = tuple[tuple[int, StoredRange], ...]
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


def pack_ranges(ranges: Ranges) -> list[list[int]]:
    """Return runs of [object index, offset, length, byte_start, count].

    ``count`` ranges of ``length`` elements that follow each other, in as many consecutive
    objects, each at the same byte: what equal slices over ranks look like.
    """
    runs: list[list[int]] = []
    for index, stored in ranges:
        if runs:
            first, offset, length, start, count = runs[-1]
            due = [first + count, offset + count * length, length, start]
            if [index, stored.offset, stored.length, stored.byte_start] == due:
                runs[-1][4] += 1
                continue
        runs.append([index, stored.offset, stored.length, stored.byte_start, 1])
    return runs


def unpack_ranges(runs: list[list[int]]) -> Ranges:
    """Read ``pack_ranges`` back.

    Raises:
        ValueError: A run is not five numbers.
    """
    return tuple(
        (index + n, StoredRange(offset=offset + n * length, length=length, byte_start=start))
        for index, offset, length, start, count in runs
        for n in range(count)
    )
