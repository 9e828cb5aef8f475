# SPDX-License-Identifier: Apache-2.0
"""Micro batches read ahead by a thread. Faked: the source, which returns positions as tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from raydist.errors import DataError
from raydist.train.feed import BatchFeed
from raydist.world import BatchPlan, plan_batch

_PLAN = plan_batch(global_batch_size=12, micro_batch_size=2, world_size=2)
_LENGTH = 3


class _PositionsAsTokens:
    """Row p is [p, p, p]; fails from ``fails_at`` on."""

    def __init__(self, fails_at: int | None = None) -> None:
        self._fails_at = fails_at
        self.asked: list[range] = []
        self.has_read = threading.Semaphore(0)

    def batch(self, positions: range) -> NDArray[np.int64]:
        if self._fails_at is not None and positions.stop > self._fails_at:
            raise DataError(problem=f"no sample {self._fails_at}")
        self.asked.append(positions)
        self.has_read.release()
        return np.repeat(np.asarray(positions, np.int64)[:, None], _LENGTH, axis=1)


_MakeFeed = Callable[..., BatchFeed]


@pytest.fixture
def make_feed() -> Iterator[_MakeFeed]:
    feeds: list[BatchFeed] = []

    def make(
        source: _PositionsAsTokens, *, plan: BatchPlan = _PLAN, rank: int = 0, start: int = 0,
        num_steps: int = 5, depth: int = 2,
    ) -> BatchFeed:  # fmt: skip
        feeds.append(
            BatchFeed(
                source,
                plan,
                rank=rank,
                start=start,
                num_steps=num_steps,
                device=torch.device("cpu"),
                depth=depth,
            )
        )
        return feeds[-1]

    yield make
    for feed in feeds:
        feed.close()


def _step(feed: BatchFeed) -> list[list[int]]:
    """Positions of the next step, a list a micro batch."""
    return [batch["tokens"][:, 0].tolist() for batch in feed.next()]


def _feed_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "raydist-feed"]


def test_feed_gives_each_rank_its_micro_batches_in_order(make_feed: _MakeFeed) -> None:
    first, second = (make_feed(_PositionsAsTokens(), rank=rank) for rank in (0, 1))
    assert _step(first) == [[0, 1], [2, 3], [4, 5]]
    assert _step(second) == [[6, 7], [8, 9], [10, 11]]
    assert _step(first) == [[12, 13], [14, 15], [16, 17]]


def test_feed_tokens_are_int64_of_micro_batch_by_sequence(make_feed: _MakeFeed) -> None:
    (tokens, *_) = (batch["tokens"] for batch in make_feed(_PositionsAsTokens()).next())
    assert tokens.dtype == torch.int64
    assert tokens.shape == (2, _LENGTH)
    assert tokens[1].tolist() == [1, 1, 1]


def test_feed_resumed_at_any_step_equals_the_tail_of_the_unbroken_one(
    make_feed: _MakeFeed,
) -> None:
    unbroken = make_feed(_PositionsAsTokens(), rank=1, num_steps=6)
    steps = [_step(unbroken) for _ in range(6)]
    for done in range(6):
        resumed = make_feed(
            _PositionsAsTokens(), rank=1, start=done * 12, num_steps=6 - done, depth=1 + done
        )
        assert [_step(resumed) for _ in range(6 - done)] == steps[done:]


def test_feed_of_another_split_covers_the_same_global_batches(make_feed: _MakeFeed) -> None:
    def global_batches(micro_batch_size: int, world_size: int) -> list[list[int]]:
        plan = plan_batch(
            global_batch_size=12, micro_batch_size=micro_batch_size, world_size=world_size
        )
        feeds = [
            make_feed(_PositionsAsTokens(), plan=plan, rank=rank, start=24, num_steps=3)
            for rank in range(world_size)
        ]
        return [[p for f in feeds for m in _step(f) for p in m] for _ in range(3)]

    expected = [list(range(start, start + 12)) for start in (24, 36, 48)]
    for split in ((2, 2), (1, 12), (12, 1), (3, 4), (4, 1)):
        assert global_batches(*split) == expected


def test_feed_reads_no_further_than_its_depth_and_its_last_step(make_feed: _MakeFeed) -> None:
    source = _PositionsAsTokens()
    feed = make_feed(source, num_steps=50, depth=2)
    for _ in range(9):  # two steps in the queue and one in hand, of three micro batches each
        source.has_read.acquire()
    assert not source.has_read.acquire(timeout=0.1)
    feed.close()
    source = _PositionsAsTokens()
    feed = make_feed(source, num_steps=2)
    assert [_step(feed), _step(feed)][-1] == [[12, 13], [14, 15], [16, 17]]
    feed.close()
    assert [r.start for r in source.asked] == [0, 2, 4, 12, 14, 16]


def test_feed_error_in_the_source_is_raised_by_next_at_its_step(make_feed: _MakeFeed) -> None:
    feed = make_feed(_PositionsAsTokens(fails_at=26))
    assert len(_step(feed)) == len(_step(feed)) == 3
    with pytest.raises(DataError, match="no sample 26"):
        feed.next()


def test_feed_close_ends_the_thread_even_when_its_queue_is_full(make_feed: _MakeFeed) -> None:
    source = _PositionsAsTokens()
    feed = make_feed(source, num_steps=50, depth=1)
    for _ in range(6):
        source.has_read.acquire()
    assert len(_feed_threads()) == 1
    feed.close()
    assert _feed_threads() == []


def test_feed_close_ends_the_thread_when_an_error_waits_in_a_full_queue(
    make_feed: _MakeFeed,
) -> None:
    source = _PositionsAsTokens(fails_at=14)
    feed = make_feed(source, depth=1)
    for _ in range(4):
        source.has_read.acquire()
    feed.close()
    assert _feed_threads() == []


def test_feed_close_twice_is_no_error(make_feed: _MakeFeed) -> None:
    feed = make_feed(_PositionsAsTokens())
    feed.close()
    feed.close()


def test_feed_of_no_steps_ends_by_itself(make_feed: _MakeFeed) -> None:
    source = _PositionsAsTokens()
    make_feed(source, num_steps=0).close()
    assert source.asked == []
