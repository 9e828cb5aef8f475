# SPDX-License-Identifier: Apache-2.0
"""Slices of flattened tensors and the proof that they cover one. Pure: nothing is faked."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.checkpoint.ranges import TensorSpec, check_cover, partition
from raydist.errors import CheckpointError

NUMELS = st.integers(0, 5_000) | st.integers(2**40, 2**40 + 10_000)


@settings(deadline=None, database=None)
@given(numel=NUMELS, world_size=st.integers(1, 700))
def test_partition_of_any_tensor_is_deepspeeds_ceil_rule_and_covers_it(
    numel: int, world_size: int
) -> None:
    slices = [partition(numel, world_size=world_size, rank=rank) for rank in range(world_size)]
    check_cover("t", numel, slices)
    size = (numel + world_size - 1) // world_size
    for rank, (offset, length) in enumerate(slices):
        assert offset == min(rank * size, numel)
        assert length == max(0, min(size, numel - rank * size))


@pytest.mark.parametrize(
    ("numel", "world_size", "slices"),
    [
        (10, 4, [(0, 3), (3, 3), (6, 3), (9, 1)]),
        (2, 4, [(0, 1), (1, 1), (2, 0), (2, 0)]),
        (9, 4, [(0, 3), (3, 3), (6, 3), (9, 0)]),
        (0, 2, [(0, 0), (0, 0)]),
        (1, 1, [(0, 1)]),
    ],
)
def test_partition_of_small_tensors_leaves_the_last_ranks_short(
    numel: int, world_size: int, slices: list[tuple[int, int]]
) -> None:
    found = [partition(numel, world_size=world_size, rank=rank) for rank in range(world_size)]
    assert found == slices


def cuts_of(numel: int, seed: int) -> list[tuple[int, int]]:
    source = random.Random(seed)
    bounds = sorted({0, numel, *(source.randrange(numel + 1) for _ in range(5))})
    ranges = [(a, b - a) for a, b in itertools.pairwise(bounds)]
    source.shuffle(ranges)
    return ranges


@settings(deadline=None, database=None)
@given(numel=st.integers(1, 1_000), seed=st.integers(0, 10_000), empty=st.integers(0, 1_000))
def test_cover_by_ranges_in_any_order_is_accepted(numel: int, seed: int, empty: int) -> None:
    check_cover("t", numel, [*cuts_of(numel, seed), (empty, 0)])


@settings(deadline=None, database=None)
@given(numel=st.integers(1, 1_000), seed=st.integers(0, 10_000), data=st.data())
def test_cover_with_any_range_changed_is_refused(
    numel: int, seed: int, data: st.DataObject
) -> None:
    ranges = cuts_of(numel, seed)
    at = data.draw(st.integers(0, len(ranges) - 1))
    offset, length = ranges[at]
    how = data.draw(st.sampled_from(["dropped", "doubled", "shorter", "longer", "moved"]))
    ranges[at : at + 1] = {
        "dropped": [],
        "doubled": [(offset, length)] * 2,
        "shorter": [(offset, length - 1)],
        "longer": [(offset, length + 1)],
        "moved": [(offset + 1, length)],
    }[how]
    with pytest.raises(CheckpointError, match="tensor-name"):
        check_cover("tensor-name", numel, ranges)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 3), (5, 5)], "element 3 of 10 is missing"),
        ([(2, 8)], "element 0 of 10 is missing"),
        ([(0, 6), (4, 6)], "element 4 of 10 stands twice"),
        ([(0, 10), (0, 10)], "element 0 of 10 stands twice"),
        ([(0, 10), (10, 2)], "cover 12 of 10"),
        ([(0, 9)], "cover 9 of 10"),
        ([], "cover 0 of 10"),
        ([(0, 12), (12, -2)], "range of -2 elements"),
        ([(-2, 12)], "element -2"),
    ],
)
def test_cover_that_is_wrong_names_tensor_and_element(
    ranges: list[tuple[int, int]], message: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_cover("master/w", 10, ranges)
    assert "master/w" in str(caught.value)
    assert message in str(caught.value)


def test_numel_of_scalars_and_empty_shapes_is_one_and_zero() -> None:
    assert TensorSpec(key="t", shape=(), dtype="F32").numel == 1
    assert TensorSpec(key="t", shape=(3, 0, 5), dtype="F32").numel == 0
    assert TensorSpec(key="t", shape=(3, 4, 5), dtype="F32").numel == 60
