# SPDX-License-Identifier: Apache-2.0
"""Rank and batch arithmetic. Nothing is faked."""

from __future__ import annotations

import re
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.errors import BatchNotDivisibleError, ConfigError, nearest_multiples
from raydist.world import BatchPlan, World, plan_batch

_PLACE = {
    "world_size": 8, "rank": 5, "local_world_size": 4, "local_rank": 1,
    "num_nodes": 2, "node_rank": 1,
}  # fmt: skip


def _world(**changes: int) -> World:
    return World(**{**_PLACE, **changes})


def test_world_in_range_keeps_its_place() -> None:
    world = _world()
    assert (world.rank, world.local_rank, world.node_rank) == (5, 1, 1)
    assert not world.is_main
    assert _world(rank=0).is_main


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("rank", 8, 8),
        ("rank", -1, 8),
        ("local_rank", 4, 4),
        ("local_rank", -1, 4),
        ("node_rank", 2, 2),
        ("node_rank", -1, 2),
    ],
)
def test_world_index_out_of_range_is_refused_by_name(name: str, value: int, bound: int) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value} is not in [0, {bound}).")):
        _world(**{name: value})


def test_world_without_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank=0"):
        _world(world_size=0, rank=0)


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "world_size", "accumulation"),
    [(256, 1, 8, 32), (16, 8, 2, 1), (1, 1, 1, 1), (960, 4, 24, 10), (12, 3, 1, 4)],
)
def test_plan_batch_divisible_derives_accumulation(
    global_batch_size: int, micro_batch_size: int, world_size: int, accumulation: int
) -> None:
    plan = plan_batch(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        world_size=world_size,
    )
    assert plan == BatchPlan(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=accumulation,
        world_size=world_size,
    )


def _refusal(global_batch_size: int, micro_batch_size: int, world_size: int) -> str:
    with pytest.raises(BatchNotDivisibleError) as caught:
        plan_batch(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            world_size=world_size,
        )
    return str(caught.value)


def test_plan_batch_1000_over_4_x_24_offers_960_or_1056() -> None:
    assert _refusal(1000, 4, 24) == (
        "batch.global_batch_size=1000 is not a multiple of micro_batch_size=4 x world_size=24 "
        "(=96).\n"
        "  Set batch.global_batch_size to 960 or 1056, or change scaling.workers."
    )


def test_plan_batch_256_over_2_x_7_offers_252_or_266() -> None:
    assert _refusal(256, 2, 7) == (
        "batch.global_batch_size=256 is not a multiple of micro_batch_size=2 x world_size=7 "
        "(=14).\n"
        "  Set batch.global_batch_size to 252 or 266, or change scaling.workers."
    )


def test_plan_batch_below_one_unit_offers_no_zero_and_a_smaller_micro_batch() -> None:
    assert _refusal(4, 4, 2) == (
        "batch.global_batch_size=4 is not a multiple of micro_batch_size=4 x world_size=2 (=8).\n"
        "  Set batch.global_batch_size to 8, or batch.micro_batch_size to 2, "
        "or change scaling.workers."
    )


_SIZES = st.integers(1, 2000), st.integers(1, 64), st.integers(1, 64)


@settings(deadline=None)
@given(*_SIZES)
def test_plan_batch_refused_then_offered_values_work(
    global_batch_size: int, micro_batch_size: int, world_size: int
) -> None:
    try:
        plan_batch(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            world_size=world_size,
        )
    except BatchNotDivisibleError as error:
        text = str(error)
        sizes = re.search(r"global_batch_size to (\d+)(?: or (\d+))?", text)
        assert sizes is not None
        for size in filter(None, sizes.groups()):
            assert int(size) > 0
            plan_batch(
                global_batch_size=int(size),
                micro_batch_size=micro_batch_size,
                world_size=world_size,
            )
        micro = re.search(r"batch\.micro_batch_size to (\d+)", text)
        if micro:
            plan_batch(
                global_batch_size=global_batch_size,
                micro_batch_size=int(micro[1]),
                world_size=world_size,
            )
        else:
            assert global_batch_size % world_size  # or micro_batch_size=1 would have worked


@settings(deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 10**6))
def test_nearest_multiples_enclose_the_value(value: int, unit: int) -> None:
    below, above = nearest_multiples(value, unit)
    assert below % unit == above % unit == 0
    assert below <= value < above
    assert above - below == unit


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 16), st.integers(0, 10**12))
def test_positions_any_split_covers_the_global_batch_exactly_once(
    micro_batch_size: int, accumulation: int, world_size: int, start: int
) -> None:
    size = micro_batch_size * accumulation * world_size
    plan = plan_batch(
        global_batch_size=size, micro_batch_size=micro_batch_size, world_size=world_size
    )
    assert plan.gradient_accumulation_steps == accumulation
    covered: list[int] = []
    for rank in range(world_size):
        ranges = plan.positions(start=start, rank=rank)
        assert [len(r) for r in ranges] == [micro_batch_size] * accumulation
        covered += chain.from_iterable(ranges)
    assert covered == list(range(start, start + size))
