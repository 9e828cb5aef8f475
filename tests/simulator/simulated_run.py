# SPDX-License-Identifier: Apache-2.0
"""Runs, restarts and takeovers of one run under the scheduler, drawn from a seed.

Real: journal, attempts, lease, saver, restore decision, retention. Simulated: time, store,
processes, collectives, and a launcher that restarts worker groups as raydist's does.

    python tests/simulator/simulated_run.py SEED     shows one schedule, request by request
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from greenlet import getcurrent
from simulated_checks import NUM_BYTES, Checker, InvariantError, content
from simulated_world import (
    Bucket,
    Faults,
    HangError,
    Process,
    RankLostError,
    SimulatedClock,
    SimulatedGroup,
    SimulatedStore,
    World,
)

from raydist.checkpoint import layout
from raydist.checkpoint.attempt import Attempt, open_attempt
from raydist.checkpoint.group import Group
from raydist.checkpoint.journal import Journal
from raydist.checkpoint.lease import LEASE_RENEW_S, Holder, Lease
from raydist.checkpoint.manifest import Manifest, Progress
from raydist.checkpoint.objects import crc32c
from raydist.checkpoint.prune import Pruner
from raydist.checkpoint.ranges import LocalRange, TensorSpec, WantedRange, partition
from raydist.checkpoint.reads import Span
from raydist.checkpoint.restore import restore
from raydist.checkpoint.retention import RetentionPolicy
from raydist.checkpoint.runs import decide_start
from raydist.checkpoint.saver import RunIdentity, SaveOutcome, Saver
from raydist.config import RunConfig
from raydist.errors import (
    CheckpointCorruptError,
    FencedError,
    ObjectMissingError,
    RaydistError,
)
from raydist.storage import ObjectStore
from raydist.testing.configs import small_config

LIMIT_S = 300.0
"""By then everything has ended in progress or a named error (I6)."""
SPEC = TensorSpec(key="master/w", shape=(NUM_BYTES,), dtype="U8")
CONFIG: RunConfig = small_config(name="toy", resume="auto")
IDENTITY = RunIdentity(
    run="toy", strategy="ddp", precision="fp32", config_hash="c", corpus="c", versions={}
)


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
            self, "last", DriverPlan(start_s=0.0, world_size=2, restarts=0), faults=Faults()
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


class Renewal:
    """Beats in an actor of the rank's process."""

    def __init__(self, process: Process, lease: Lease) -> None:
        self._is_stopping = False
        self._world = process.world
        self._lease = lease
        process.start(self._run)

    def stop(self) -> None:
        self._is_stopping = True

    def _run(self) -> None:
        while True:
            self._world.sleep(LEASE_RENEW_S)
            if self._is_stopping:
                return
            self._lease.beat()


class Rank:
    """What run_rank does, less the training."""

    def __init__(self, workers: WorkerGroup, rank: int) -> None:
        driver = workers.driver
        self.simulation = driver.simulation
        self.world = driver.world
        self.checker = driver.simulation.checker
        self.plan = driver.simulation.plan
        self.driver = driver
        self.workers = workers
        self.rank = rank
        self.process = workers.processes[rank]
        self.group: Group = workers.group.members[rank]
        self.store: ObjectStore = SimulatedStore(
            self.process, driver.simulation.bucket, driver.faults
        )
        self.clock = SimulatedClock(self.world, skew_s=100 * self.world.rng.random())

    def run(self) -> None:
        attempt: Attempt | None = None

        def open_it() -> int:
            nonlocal attempt
            attempt = open_attempt(
                run="toy",
                store=self.store,
                driver=self.driver.name,
                clock=self.clock,
                seen_attempt=self.workers.seen_attempt,
                takeover=self.driver.plan.takeover,
                holder=self.simulation.holder(self.process),
                renew=lambda lease: Renewal(self.process, lease),
            )
            return attempt.number

        number = self._agree(open_it)
        step = self._restore(number, attempt)
        pruner = None
        if attempt is not None:
            pruner = Pruner(store=self.store, attempt=attempt, policy=self.plan.policy)
        saver = Saver(
            store=self.store,
            group=self.group,
            attempt_number=number,
            attempt=attempt,
            identity=IDENTITY,
            max_abandoned=self.plan.max_abandoned,
            pruner=pruner,
        )
        self._train(saver, number, step)
        if attempt is not None:
            if pruner is not None:
                pruner.finish()
            attempt.close("finished")

    def _train(self, saver: Saver, number: int, step: int) -> None:
        num_steps = self.plan.num_steps
        while step < num_steps:
            self.clock.sleep(0.5)
            step += 1
            if self.rank == 0:
                self._note_step(number, step)
            if step % self.plan.every and step < num_steps:
                continue
            save = 0
            while True:
                save += 1
                outcome = self._save(saver, number, step, save)
                if outcome.committed or step < num_steps:
                    break

    def _note_step(self, number: int, step: int) -> None:
        if self.checker.is_current(number):
            self.checker.progress[number].step = step

    def _save(self, saver: Saver, number: int, step: int, save: int) -> SaveOutcome:
        state = content(number, step, save)
        self.checker.saved.setdefault((number, step), set()).add(state)
        offset, length = partition(NUM_BYTES, world_size=self.group.world_size, rank=self.rank)
        data = memoryview(bytearray(state[offset : offset + length]))
        ranges = [LocalRange(spec=SPEC, offset=offset, length=length, data=data)]
        position = Progress(step=step, data_position=step, epoch=0, tokens=step, skipped_steps=0)
        progress = self.checker.progress[number]
        if self.rank == 0:
            progress.failed_saves += 1  # until it is known to have come to something
        try:
            outcome = saver.save(ranges, progress=position, scalars={})
        except FencedError:
            self.checker.denied.add((number, step, save))
            raise
        if self.rank == 0 and outcome.committed:
            progress.failed_saves = 0
            progress.reported = step
        if not outcome.committed and "is committed is unknown" not in outcome.why:
            self.checker.denied.add((number, step, save))
        return outcome

    def _restore(self, number: int, attempt: Attempt | None) -> int:
        commit = self._agree(
            lambda: Journal(self.store).newest_commit(attempt.tail) if attempt else None
        )
        found = restore(
            store=self.store, group=self.group, commit=commit, wanted=self._wanted, read=read_spans
        )
        folder = layout.parse_folder(found.manifest.objects[0].key) if found else None
        if attempt is not None:
            self.checker.restored(
                attempt=number,
                folder=folder,
                skipped=found.skipped if found else (),
                opened=attempt.opened.number,
            )
            self._note_step(number, folder.step if folder else 0)
        if found is None or folder is None:
            return 0
        offset, length = partition(NUM_BYTES, world_size=self.group.world_size, rank=self.rank)
        due = self.checker.states[folder][offset : offset + length]
        if bytes(found.buffers["master/w"]) != due:
            self.checker.fail("I1", f"{self.process.name} restored other bytes than were saved")
        return folder.step

    def _wanted(self, manifest: Manifest) -> list[WantedRange]:
        offset, length = partition(NUM_BYTES, world_size=self.group.world_size, rank=self.rank)
        return [WantedRange(spec=SPEC, offset=offset, length=length)]

    def _agree(self, action: Callable[[], Any]) -> Any:
        box: tuple[Any, RaydistError | None] = (None, None)
        if self.rank == 0:
            try:
                box = (action(), None)
            except RaydistError as error:
                box = (None, error)
        value, error = self.group.broadcast(box)
        if error is not None:
            raise error
        return value


def read_spans(
    store: ObjectStore, manifest: Manifest, spans: Sequence[Span], buffers: dict[str, memoryview]
) -> int:
    """As raydist reads, without its threads."""
    for span in spans:
        info = manifest.objects[span.object_index]
        try:
            data = store.get(info.key, start=span.start, length=span.length)
        except ObjectMissingError as error:
            raise CheckpointCorruptError(key=info.key, reason="the object is missing") from error
        if len(data) != span.length or [crc32c(data)] != list(info.blocks):
            raise CheckpointCorruptError(key=info.key, reason="altered")
        for copy in span.copies:
            at = copy.start - span.start
            buffers[copy.key][copy.to : copy.to + copy.length] = data[at : at + copy.length]
    return sum(span.length for span in spans)


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
