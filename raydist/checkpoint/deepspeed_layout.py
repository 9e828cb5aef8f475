# SPDX-License-Identifier: Apache-2.0
"""Where DeepSpeed's flat optimizer partitions hold which elements of which parameter. Pure.

Source: DeepSpeed 0.19.8, runtime/zero/stage3.py, runtime/zero/stage_1_and_2.py and
utils/zero_to_fp32.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raydist.checkpoint.ranges import partition
from raydist.errors import CheckpointError

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Elements [offset, offset + length) of a parameter, at ``start`` of flat tensor ``flat``.

    Fields:
        flat: Index of the flat tensor among those of the rank that ``rank`` names.
    """

    name: str
    shape: tuple[int, ...]
    rank: int
    flat: int
    start: int
    offset: int
    length: int


def stage3_pieces(
    groups: Sequence[Shapes], flat_numels: Sequence[int], *, rank: int, world_size: int
) -> list[Piece]:
    """Return what one rank of ZeRO-3 holds.

    A parameter's partition has ceil(numel / world_size) elements, the last rank's padded; the
    partitions follow each other, and a flat tensor ends between two of them.

    Args:
        groups: Shapes of the parameters of each optimizer group, in DeepSpeed's order.
        flat_numels: Elements of each of the rank's flat tensors.
        rank: The rank.
        world_size: Ranks that saved.

    Raises:
        CheckpointError: They do not add up.
    """
    pieces: list[Piece] = []
    flat, start = 0, 0
    for name, shape in ((n, s) for group in groups for n, s in group.items()):
        numel = math.prod(shape)
        padded = -(-numel // world_size)
        if flat < len(flat_numels) and start == flat_numels[flat]:
            flat, start = flat + 1, 0
        if flat >= len(flat_numels) or start + padded > flat_numels[flat]:
            raise CheckpointError(
                problem=f"{name} {list(shape)} does not fit the flat tensors of rank {rank}, "
                f"which have {list(flat_numels)} elements."
            )
        offset, length = partition(numel, world_size=world_size, rank=rank)
        pieces.append(
            Piece(
                name=name,
                shape=tuple(shape),
                rank=rank,
                flat=flat,
                start=start,
                offset=offset,
                length=length,
            )
        )
        start += padded
    if flat != len(flat_numels) - 1 or start != flat_numels[flat]:
        raise CheckpointError(
            problem=f"Rank {rank} has flat tensors of {list(flat_numels)} elements; the parameters "
            f"end at element {start} of number {flat}."
        )
    return pieces


def stage12_pieces(
    groups: Sequence[Shapes],
    paddings: Sequence[Sequence[int]] | None,
    flat_numels: Sequence[Sequence[int]],
) -> list[Piece]:
    """Return what all ranks of ZeRO-1 or ZeRO-2 hold.

    Each optimizer group is one long tensor of its parameters, cut over the ranks wherever the
    cuts fall; what pads it at the end is not saved, what pads it between parameters is.

    Args:
        groups: Shapes of the parameters of each optimizer group, in DeepSpeed's order.
        paddings: Elements after each parameter of each group; None: none.
        flat_numels: For each rank, elements of its part of each group.

    Raises:
        CheckpointError: They do not add up.
    """
    pieces: list[Piece] = []
    for number, group in enumerate(groups):
        if any(len(numels) != len(groups) for numels in flat_numels):
            raise CheckpointError(
                problem=f"{len(groups)} groups of parameters, and flat tensors for "
                f"{sorted({len(numels) for numels in flat_numels})}."
            )
        bounds = [0]
        for numels in flat_numels:
            bounds.append(bounds[-1] + numels[number])
        at = 0
        for index, (name, shape) in enumerate(group.items()):
            numel = math.prod(shape)
            pieces += _cut(name, tuple(shape), number, at, at + numel, bounds)
            at += numel
            end = at
            if paddings is not None:
                at += paddings[number][index]
        if not end <= bounds[-1] <= at:
            raise CheckpointError(
                problem=f"The parameters of group {number} have {end} elements; the ranks hold "
                f"{bounds[-1]}."
            )
    return pieces


def _cut(
    name: str, shape: tuple[int, ...], flat: int, first: int, end: int, bounds: Sequence[int]
) -> list[Piece]:
    """Cut the parameter at [first, end) of a group where the ranks' parts meet."""
    pieces: list[Piece] = []
    for rank in range(len(bounds) - 1):
        low, high = max(first, bounds[rank]), min(end, bounds[rank + 1])
        if low < high:
            pieces.append(
                Piece(
                    name=name,
                    shape=shape,
                    rank=rank,
                    flat=flat,
                    start=low - bounds[rank],
                    offset=low - first,
                    length=high - low,
                )
            )
    return pieces
