# SPDX-License-Identifier: Apache-2.0
"""What befalls the drivers, ranks and storage of one schedule, drawn from its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from simulated_world import Faults

from raydist.checkpoint.retention import RetentionPolicy


@dataclass(kw_only=True)
class DriverPlan:
    """One submission: when, and what befalls it."""

    start_s: float
    world_size: int
    takeover: bool = False
    restarts: int = 2
    crash_at: list[tuple[int, int]] = field(default_factory=list)
    """(rank, number of the request): killed there, one for each attempt in turn."""
    freeze: tuple[int, int, float] | None = None
    """(rank, number of the request, seconds) for which it stands still in the first attempt."""
    broken: tuple[int, float] | None = None
    """This rank's store fails from its start for so long."""
    zombie_s: float = 0.0
    """How long ranks live on after the driver has given the group up."""
    given_up_s: float | None = None
    """When the driver gives up its first group, although all ranks live."""
    killed_s: float | None = None
    """When the driver itself is killed."""
    damage: int = 0
    """How many committed checkpoints the storage damages before it starts."""


@dataclass(kw_only=True)
class Plan:
    """A schedule's setting."""

    num_steps: int
    every: int
    policy: RetentionPolicy
    faults: Faults
    drivers: list[DriverPlan]
    lose_at_commit: int
    max_abandoned: int


def draw_plan(rng: random.Random) -> Plan:
    def some(chance: float) -> bool:
        return rng.random() < chance

    every = rng.choice((1, 2, 2, 3))
    num_steps = every * rng.randint(1, 4) + rng.randint(0, 1)
    rate = rng.choice((0.0, 0.0, 0.02, 0.05, 0.15))
    faults = Faults(
        refused=rate * rng.random(),
        reply_lost=rate * rng.random(),
        late=rate * rng.random(),
        late_s=rng.choice((3.0, 20.0, 100.0)),
        only=rng.choice(("", "", "journal/0", "checkpoints/", "manifest")),
    )
    drivers = []
    start_s = 0.0
    for index in range(rng.choice((1, 1, 2, 2, 3))):
        world_size = rng.choice((1, 2, 2, 3))
        driver = DriverPlan(start_s=start_s, world_size=world_size, takeover=some(0.5))
        if index == 0:
            driver.takeover = some(0.1)
        if some(0.5):
            driver.crash_at = [
                (rng.randrange(world_size), rng.randint(1, 40)) for _ in range(rng.randint(1, 2))
            ]
        if some(0.1):
            driver.broken = rng.randrange(world_size), rng.choice((8.0, 20.0, 1e9))
        if some(0.3):
            driver.freeze = (
                rng.choice((0, 0, world_size - 1)),
                rng.randint(1, 40),
                rng.choice((2.0, 15.0, 60.0)) * rng.random(),
            )
        driver.zombie_s = rng.choice((0.0, 0.0, 5.0, 40.0))
        driver.given_up_s = rng.uniform(0.0, 10.0) if some(0.15) else None
        driver.killed_s = rng.uniform(0.0, 15.0) if some(0.2) else None
        driver.damage = rng.randint(1, 2) if index and some(0.2) else 0
        drivers.append(driver)
        start_s += rng.choice((0.0, 1.0, 4.0, 12.0, 40.0)) * rng.random()
    return Plan(
        num_steps=num_steps,
        every=every,
        policy=RetentionPolicy(
            keep_last=rng.choice((None, 1, 1, 2)), keep_every_steps=rng.choice((None, None, 2))
        ),
        faults=faults,
        drivers=drivers,
        lose_at_commit=rng.randint(2, 4) if some(0.05) else 0,
        max_abandoned=rng.choice((2, 3)),
    )
