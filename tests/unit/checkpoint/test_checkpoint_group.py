# SPDX-License-Identifier: Apache-2.0
"""The Group contract, on one rank and on threads, and how the thread group breaks."""

from __future__ import annotations

import threading

import pytest

from raydist.checkpoint.group import Group
from raydist.errors import FencedError
from raydist.testing.single_rank import SingleRank
from raydist.testing.thread_group import ThreadGroup


def round_trip(member: Group) -> tuple[object, object]:
    gathered = member.gather({"rank": member.rank, "raw": b"\x00"})
    return gathered, member.broadcast(["from", member.rank])


def test_single_rank_gathers_and_broadcasts_its_own_value() -> None:
    assert round_trip(SingleRank()) == ([{"rank": 0, "raw": b"\x00"}], ["from", 0])


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_thread_ranks_gather_on_rank_0_and_hear_rank_0(world_size: int) -> None:
    results = ThreadGroup(world_size).run(round_trip)
    everyone = [{"rank": rank, "raw": b"\x00"} for rank in range(world_size)]
    assert results == [(everyone if r == 0 else None, ["from", 0]) for r in range(world_size)]


def test_thread_ranks_exchange_copies_many_times_in_order() -> None:
    def work(member: Group) -> list[int]:
        heard = []
        for number in range(200):
            box = member.broadcast([number] if member.rank == 0 else None)
            box.append(member.rank)  # must not be seen by the others
            heard.append(len(box))
            assert (member.gather(number) or [number] * 3) == [number] * 3
        return heard

    assert ThreadGroup(3).run(work) == [[2] * 200] * 3


def test_thread_rank_that_fails_breaks_the_others_collective_and_is_raised() -> None:
    def work(member: Group) -> object:
        if member.rank == 1:
            raise FencedError(run="r", attempt=1, holder="h", holder_attempt=2)
        return member.broadcast(1)

    group = ThreadGroup(3)
    outcomes = group.outcomes(work)
    assert isinstance(outcomes[1], FencedError)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, RuntimeError)
        assert r"ranks [1] did not come" in str(outcome)
    with pytest.raises(FencedError):
        group.run(work)
    assert group.run(lambda member: member.broadcast(member.rank)) == [0, 0, 0]


def test_thread_rank_that_leaves_early_breaks_the_others_collective() -> None:
    outcomes = ThreadGroup(2).outcomes(
        lambda member: None if member.rank else member.gather("alone")
    )
    assert isinstance(outcomes[0], RuntimeError)
    assert outcomes[1] is None


def test_thread_ranks_in_different_collectives_break() -> None:
    outcomes = ThreadGroup(2).outcomes(
        lambda member: member.gather(1) if member.rank else member.broadcast(1)
    )
    assert all("broadcast/gather" in str(outcome) for outcome in outcomes)


def test_thread_rank_that_stays_away_breaks_the_others_at_the_limit() -> None:
    gate = threading.Event()

    def work(member: Group) -> object:
        if member.rank == 1:
            gate.wait(20)
            return None
        try:
            return member.broadcast(1)
        finally:
            gate.set()

    outcomes = ThreadGroup(2, limit_s=0.05).outcomes(work)
    assert "ranks [1] did not come" in str(outcomes[0])
