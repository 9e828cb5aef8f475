# SPDX-License-Identifier: Apache-2.0
"""Collectives of simulated ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from greenlet import getcurrent
from simulated_world import Process, RankLostError, World

COLLECTIVE_S = 30.0
"""After which a collective with a dead member is an error."""


class SimulatedGroup:
    """Ranks of one worker group. As with gloo, a sender does not wait for the receiver."""

    def __init__(self, world: World, processes: list[Process]) -> None:
        self.world = world
        self.processes = processes
        self.members = [_Member(self, rank) for rank in range(len(processes))]
        self.values: dict[tuple[int, int], Any] = {}
        """By (collective, rank)."""
        self.waiting: list[Callable[[], bool]] = []
        for process in processes:
            process.on_death.append(self.look_again)

    def look_again(self) -> None:
        """Let those go on whose values are all there, or never will be."""
        self.waiting = [look for look in self.waiting if not look()]

    def receive(self, keys: list[tuple[int, int]]) -> list[Any]:
        """Wait for values; from an actor.

        Raises:
            RankLostError: One of the senders is gone.
        """
        world, values = self.world, self.values
        if not all(key in values for key in keys):
            actor = getcurrent()
            told: list[bool] = []

            def look() -> bool:
                if all(key in values for key in keys):
                    world.at(0.001 + 0.01 * world.rng.random(), lambda: world.resume(actor, True))
                    return True
                gone = any(
                    not self.processes[rank].alive and (number, rank) not in values
                    for number, rank in keys
                )
                if gone and not told:
                    told.append(True)
                    world.at(COLLECTIVE_S, lambda: world.resume(actor, False))
                return gone

            if not look():
                self.waiting.append(look)
            if not world.wait():
                raise RankLostError("a member of the group is gone")
        return [values[key] for key in keys]


class _Member:
    """Implements Group for one rank."""

    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.world_size = len(group.processes)
        self._number = 0

    def gather(self, value: Any) -> list[Any] | None:
        number = self._send(value)
        if self.rank:
            return None
        return self._group.receive([(number, rank) for rank in range(self.world_size)])

    def broadcast(self, value: Any) -> Any:
        number = self._send(value)
        return value if self.rank == 0 else self._group.receive([(number, 0)])[0]

    def _send(self, value: Any) -> int:
        self._number += 1
        self._group.values[self._number, self.rank] = value
        self._group.look_again()
        return self._number
