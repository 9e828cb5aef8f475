# SPDX-License-Identifier: Apache-2.0
"""Runs, restarts and takeovers of one run under the scheduler, drawn from a seed.

Real: journal, attempts, lease, saver, restore decision, retention. Simulated: time, store,
processes, collectives, and a launcher that restarts worker groups as raydist's does.

    python tests/simulator/simulated_run.py SEED     shows one schedule, request by request
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent
from simulated_checks import Checker, InvariantError
from simulated_group import SimulatedGroup
from simulated_plan import DriverPlan, draw_plan
from simulated_rank import Rank
from simulated_world import (
    Bucket,
    Faults,
    HangError,
    Process,
    RankLostError,
    SimulatedClock,
    SimulatedStore,
    World,
)

from raydist.checkpoint.lease import Holder
from raydist.checkpoint.runs import decide_start
from raydist.config import RunConfig
from raydist.errors import RaydistError
from raydist.testing.configs import small_config

LIMIT_S = 300.0
"""By then everything has ended in progress or a named error (I6)."""
CONFIG: RunConfig = small_config(name="toy", resume="auto")


class Simulation:
    """One seed."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.seed = seed
        self.world = World(seed)
        self.world.trace = [] if trace else None
        self.plan = draw_plan(self.world.rng)
        self.bucket = Bucket()
        self.checker = Checker(
            world=self.world,
            bucket=self.bucket,
            every=self.plan.every,
            lose_at_commit=self.plan.lose_at_commit,
        )
        self.checker.is_admissible = self._check_admission
        self.endings: dict[str, str] = {}
        self.holders: list[Process] = []
        """Rank 0 of every attempt that was tried, by the pid of its holder."""

    def run(self) -> None:
        """Let everything happen, then mend the storage and resume once more without a fault.

        Raises:
            InvariantError: Something came to be that must never.
            HangError: Something never ended.
        """
        drivers = [Driver(self, f"d{n}", plan) for n, plan in enumerate(self.plan.drivers)]
        for driver in drivers:
            self.world.at(driver.plan.start_s, driver.start)
        self.world.run(limit_s=LIMIT_S)
        self._check_endings(drivers)
        last = Driver(
            self, "last", DriverPlan(start_s=0.0, world_size=1, restarts=0), faults=Faults()
        )
        self.world.at(0.0, last.start)
        self.world.run(limit_s=self.world.now_s + LIMIT_S)
        self._check_endings([last])
        self._check_last(self.endings["last"])

    def _check_endings(self, drivers: list[Driver]) -> None:
        for driver in drivers:
            if driver.name not in self.endings:
                raise InvariantError(f"I6: driver {driver.name} neither ended nor goes on")

    def _check_last(self, ending: str) -> None:
        """A fault-free start finishes the run and tidies up, if any checkpoint can be read."""
        checker = self.checker
        if ending != "finished":
            whole = [c for c in checker.visible.values() if c.damaged_s is None]
            if whole or not checker.visible or "No checkpoint of this run" not in ending:
                raise InvariantError(f"I6: the last, faultless start ended in {ending!r}")
            return
        checker.nothing_left_over()

    def holder(self, process: Process) -> Holder:
        self.holders.append(process)
        return Holder(host="simulated", pid=len(self.holders) - 1, started="1")

    def _check_admission(self, opened: dict[str, Any]) -> None:
        """Without --takeover, and with storage that works, nobody opens over a living writer."""
        entries = self.checker.entries
        if len(entries) < 2 or entries[-2]["kind"] == "closed":
            return
        before = self.holders[Holder.parse(entries[-2]["holder"]).pid]
        faults = self.plan.faults
        is_faultless = not (faults.refused or faults.reply_lost or faults.late)
        drivers = {f"d{n}": plan for n, plan in enumerate(self.plan.drivers)}
        asked = drivers.get(opened["driver"])
        if (
            asked is not None
            and not asked.takeover
            and opened["driver"] != entries[-2]["driver"]
            and is_faultless
            and before.alive
            and before.broken_until_s == 0.0
            and before.frozen_until_s == 0.0
        ):
            raise InvariantError(f"I2: {opened['driver']} opened over {before.name}, which lives")


class Driver:
    """A submission: allowed to start or not, then worker groups one after another."""

    def __init__(
        self, simulation: Simulation, name: str, plan: DriverPlan, faults: Faults | None = None
    ) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.name = name
        self.plan = plan
        self.faults = faults or simulation.plan.faults
        self.process = Process(self.world, name)
        self.groups: list[WorkerGroup] = []
        self.wake: Callable[[], None] | None = None

    def start(self) -> None:
        for _ in range(self.plan.damage):
            self._damage_one()
        if self.plan.killed_s is not None:
            self.world.at(self.plan.killed_s, self._killed)
        self.process.start(self._drive)

    def _damage_one(self) -> None:
        rng, checker = self.world.rng, self.simulation.checker
        whole = [c for c in checker.visible.values() if c.damaged_s is None]
        if whole:
            chosen = max(whole, key=lambda c: c.number) if rng.random() < 0.7 else rng.choice(whole)
            checker.damage(chosen, rng.choice(sorted(chosen.keys)), lose=rng.random() < 0.5)

    def _killed(self) -> None:
        if self.process.alive:
            self._end("killed")

    def _end(self, how: str) -> None:
        self.simulation.endings[self.name] = how
        self.world.note(f"{self.name} ends: {how}")
        for group in self.groups:
            group.give_up(self.plan.zombie_s)
        self.process.end()

    def _drive(self) -> None:
        try:
            how = self._attempts()
        except RaydistError as error:
            how = f"{type(error).__name__}: {error}"
        self._end(how)

    def _attempts(self) -> str:
        simulation, plan = self.simulation, self.plan
        store = SimulatedStore(self.process, simulation.bucket, self.faults)
        clock = SimulatedClock(self.world, skew_s=100 * self.world.rng.random())
        state = decide_start(CONFIG, store, clock=clock, takeover=plan.takeover)
        seen = state.tail.attempt if state.tail else 0
        how = ""
        for number in range(plan.restarts + 1):
            group = WorkerGroup(self, number, seen_attempt=seen)
            self.groups.append(group)
            group.start()
            if number == 0 and plan.given_up_s is not None:
                self.world.at(plan.given_up_s, group.lose_contact)
            how = group.wait()
            if how == "finished" or how.startswith(("Fenced", "RunAlive", "CheckpointError")):
                return how
            group.give_up(plan.zombie_s)
            clock.sleep(1.0)
        return how or "restarts are spent"


class WorkerGroup:
    """Ranks of one attempt and how they ended."""

    def __init__(self, driver: Driver, number: int, *, seen_attempt: int) -> None:
        self.driver = driver
        self.world = driver.world
        self.seen_attempt = seen_attempt
        plan = driver.plan
        self.processes = [
            Process(self.world, f"{driver.name}.{number}.rank{r}") for r in range(plan.world_size)
        ]
        if number < len(plan.crash_at):
            rank, at = plan.crash_at[number]
            self.processes[rank].crash_at = at
        if number == 0 and plan.freeze is not None:
            rank, at, seconds = plan.freeze
            self.processes[rank].freeze_at, self.processes[rank].freeze_s = at, seconds
        if plan.broken is not None:
            rank, seconds = plan.broken
            self.processes[rank].broken_until_s = self.world.now_s + seconds
        self.group = SimulatedGroup(self.world, self.processes)
        self.endings: dict[int, str] = {}
        self._look: Callable[[], None] | None = None

    def start(self) -> None:
        for rank, process in enumerate(self.processes):
            process.on_death.append(self._tell)
            process.start(lambda rank=rank: self._work(rank))

    def _work(self, rank: int) -> None:
        try:
            Rank(self, rank).run()
            how = "finished"
        except (RaydistError, RankLostError) as error:
            how = f"{type(error).__name__}: {error}"
        self.endings[rank] = how
        self.world.note(f"{self.processes[rank].name} ends: {how}")
        self.processes[rank].end()

    def wait(self) -> str:
        """Until all ranks have ended well or one has ended badly; from the driver's actor."""
        actor = getcurrent()
        if (how := self._verdict()) is None:
            told: list[bool] = []

            def look() -> None:
                if self._verdict() is not None and not told:
                    told.append(True)
                    self.world.at(0.1, lambda: self.world.resume(actor))

            self._look = look
            self.world.wait()
            how = self._verdict()
        self._look = None
        return how or "lost"

    def lose_contact(self) -> None:
        """The driver believes the group dead; it lives."""
        if self._look is not None:
            self.endings.setdefault(-1, "lost: no contact")
            self._tell()

    def give_up(self, after_s: float) -> None:
        """The driver wants its ranks gone; they are, after a while."""
        for process in self.processes:
            self.world.at(after_s, process.end)

    def _verdict(self) -> str | None:
        named = [how for how in self.endings.values() if how != "finished"]
        first = [how for how in named if not how.startswith("RankLost")]
        if first or named:
            return (first or named)[0]
        if len(self.endings) == len(self.processes):
            return "finished"
        dead = [r for r, p in enumerate(self.processes) if not p.alive and r not in self.endings]
        return f"lost: ranks {dead} died" if dead else None

    def _tell(self) -> None:
        if self._look is not None:
            self._look()


def simulate(seed: int) -> str:
    """Run one seed; return what went wrong, empty when nothing did."""
    simulation = Simulation(seed)
    try:
        simulation.run()
    except (InvariantError, HangError) as error:
        return str(error)
    return ""


def main(seed: int) -> int:
    """Show one seed."""
    simulation = Simulation(seed, trace=True)
    print(simulation.plan)
    problem = ""
    try:
        simulation.run()
    except (InvariantError, HangError) as error:
        problem = f"{type(error).__name__}: {error}"
    print("\n".join(simulation.world.trace or ()))
    print(simulation.endings)
    print(problem or "all invariants held")
    return bool(problem)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    raise SystemExit(main(int(sys.argv[1])))
