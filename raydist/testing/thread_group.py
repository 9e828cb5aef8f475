# SPDX-License-Identifier: Apache-2.0
"""N ranks as N threads of one process, with the Group contract between them."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from raydist.checkpoint.group import Group

T = TypeVar("T")


@dataclass(eq=False)
class _Meeting:
    """One collective: what it is, and the pickled values of the ranks that have come to it."""

    values: dict[int, bytes] = field(default_factory=dict)
    operations: set[str] = field(default_factory=set)


class ThreadGroup:
    """Runs one function on every rank at once.

    Stricter than a real group: every collective is a barrier, the ranks must call the same ones
    in the same order, and values cross over pickled, as between processes. A rank that ends
    while others wait for it breaks their collective with a RuntimeError, as gloo does; so does
    one that stays away for ``limit_s`` of real time.

    Args:
        world_size: Ranks.
        limit_s: Longest wait for the others, and for the whole function to end.
    """

    def __init__(self, world_size: int, *, limit_s: float = 20.0) -> None:
        self.world_size = world_size
        self.ranks: tuple[Group, ...] = tuple(_Rank(self, rank) for rank in range(world_size))
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._meetings: dict[int, _Meeting] = {}
        self._met = [0] * world_size
        self._ended: set[int] = set()
        self._first_error: BaseException | None = None

    def run(self, work: Callable[[Group], T]) -> list[T]:
        """Return each rank's result, in rank order.

        Raises:
            BaseException: The first one in time; those of other ranks may only follow from it.
        """
        outcomes = self.outcomes(work)
        if self._first_error is not None:
            raise self._first_error
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    def outcomes(self, work: Callable[[Group], T]) -> list[T | BaseException]:
        """Return each rank's result or exception, in rank order.

        Raises:
            RuntimeError: A rank did not end within the time limit.
        """
        self._meetings = {}
        self._met = [0] * self.world_size
        self._ended = set()
        self._first_error = None
        outcomes: dict[int, T | BaseException] = {}

        def one(rank: int) -> None:
            try:
                outcomes[rank] = work(self.ranks[rank])
            except BaseException as error:
                outcomes[rank] = error
            self._end(rank, outcomes[rank])

        threads = [
            threading.Thread(target=one, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * self._limit_s)
        hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if hanging:
            raise RuntimeError(f"Ranks {hanging} did not end within {2 * self._limit_s:g} s.")
        return [outcomes[rank] for rank in range(self.world_size)]

    def exchange(self, operation: str, rank: int, value: Any) -> list[bytes]:
        """Meet the other ranks and return every rank's pickled value.

        Raises:
            RuntimeError: A rank ended or stayed away, or came to another collective.
        """
        with self._changed:
            number = self._met[rank]
            self._met[rank] += 1
            meeting = self._meetings.setdefault(number, _Meeting())
            meeting.values[rank] = pickle.dumps(value)
            meeting.operations.add(operation)
            if len(meeting.values) == self.world_size:
                del self._meetings[number]  # its ranks still hold it
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_settled(meeting), self._limit_s)
            missing = set(range(self.world_size)) - meeting.values.keys()
            missing = sorted(missing & self._ended or missing)
        if missing or len(meeting.operations) > 1:
            raise RuntimeError(
                f"Rank {rank}'s collective {number} ({'/'.join(sorted(meeting.operations))}) "
                f"broke: ranks {missing} did not come to it."
            )
        return [meeting.values[r] for r in range(self.world_size)]

    def _is_settled(self, meeting: _Meeting) -> bool:
        missing = set(range(self.world_size)) - meeting.values.keys()
        return not missing or bool(missing & self._ended)

    def _end(self, rank: int, outcome: object) -> None:
        with self._changed:
            if isinstance(outcome, BaseException) and self._first_error is None:
                self._first_error = outcome
            self._ended.add(rank)
            self._changed.notify_all()


class _Rank:
    """One rank's end of a ThreadGroup."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.world_size = group.world_size

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's value in rank order on rank 0, None elsewhere."""
        values = self._group.exchange("gather", self.rank, value)
        return [pickle.loads(raw) for raw in values] if self.rank == 0 else None

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        return pickle.loads(self._group.exchange("broadcast", self.rank, value)[0])
