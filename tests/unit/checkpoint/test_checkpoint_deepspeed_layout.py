# SPDX-License-Identifier: Apache-2.0
"""Which elements DeepSpeed's flat partitions hold, against flats laid out here as it does. Pure."""

from __future__ import annotations

import math
import random
from itertools import chain

import pytest

from raydist.checkpoint.deepspeed_layout import Piece, stage3_pieces, stage12_pieces
from raydist.checkpoint.ranges import check_cover
from raydist.errors import CheckpointError

GROUPS = [{"embed": (7, 5), "up": (3, 4)}, {"norm": (5,), "bias": (1,)}]
PAD = -1.0


def _values(groups) -> dict[str, list[float]]:
    source = random.Random(3)
    return {
        name: [source.random() for _ in range(math.prod(shape))]
        for group in groups
        for name, shape in group.items()
    }


def _assert_recovers(pieces: list[Piece], flats: list[list[list[float]]], groups) -> None:
    values = _values(groups)
    for name, expected in values.items():
        own = [p for p in pieces if p.name == name]
        check_cover(name, len(expected), [(p.offset, p.length) for p in own])
        for p in own:
            found = flats[p.rank][p.flat][p.start : p.start + p.length]
            assert found == expected[p.offset : p.offset + p.length]


def _stage3_flats(world_size: int, split_after: int) -> list[list[list[float]]]:
    """Sub-groups end after ``split_after`` parameters."""
    values = list(_values(GROUPS).values())
    ranks = []
    for rank in range(world_size):
        parts = []
        for value in values:
            size = -(-len(value) // world_size)
            part = value[rank * size : (rank + 1) * size]
            parts.append(part + [PAD] * (size - len(part)))
        ranks.append([[*chain(*parts[:split_after])], [*chain(*parts[split_after:])]])
    return ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 50])
@pytest.mark.parametrize("split_after", [1, 2, 3])
def test_stage3_pieces_recover_every_parameter(world_size: int, split_after: int) -> None:
    flats = _stage3_flats(world_size, split_after)
    pieces = [
        piece
        for rank in range(world_size)
        for piece in stage3_pieces(
            GROUPS, [len(f) for f in flats[rank]], rank=rank, world_size=world_size
        )
    ]
    _assert_recovers(pieces, flats, GROUPS)


@pytest.mark.parametrize("numels", [[], [52], [54, 1], [53, 53], [20, 34]])
def test_stage3_flats_that_do_not_add_up_are_refused(numels: list[int]) -> None:
    with pytest.raises(CheckpointError):
        stage3_pieces(GROUPS, numels, rank=0, world_size=1)


def _stage12_flats(
    world_size: int, alignment: int, paddings: list[list[int]]
) -> list[list[list[float]]]:
    """A group is padded to a multiple of ranks x ``alignment``, cut evenly, its end left out."""
    values = _values(GROUPS)
    ranks: list[list[list[float]]] = [[] for _ in range(world_size)]
    for group, padding in zip(GROUPS, paddings, strict=True):
        whole: list[float] = []
        for name, count in zip(group, padding, strict=True):
            whole += values[name] + [PAD] * count
        size = -(-len(whole) // (world_size * alignment)) * alignment
        for rank in range(world_size):
            ranks[rank].append(whole[rank * size : (rank + 1) * size])
    return ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 50])
@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("paddings", [[[0, 0], [0, 0]], [[5, 0], [3, 0]]])
def test_stage12_pieces_recover_every_parameter(
    world_size: int, alignment: int, paddings: list[list[int]]
) -> None:
    flats = _stage12_flats(world_size, alignment, paddings)
    numels = [[len(f) for f in rank] for rank in flats]
    _assert_recovers(stage12_pieces(GROUPS, paddings, numels), flats, GROUPS)


@pytest.mark.parametrize("numels", [[[46, 6]], [[47, 6], [1, 0]], [[47]], [[47, 6], [0]]])
def test_stage12_flats_that_do_not_add_up_are_refused(numels: list[list[int]]) -> None:
    with pytest.raises(CheckpointError):
        stage12_pieces(GROUPS, None, numels)
