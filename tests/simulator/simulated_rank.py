# SPDX-License-Identifier: Apache-2.0
"""One rank: what run_rank does, less the training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from simulated_checks import NUM_BYTES, content
from simulated_world import Process, SimulatedClock, SimulatedStore

from raydist.checkpoint import layout
from raydist.checkpoint.attempt import Attempt, open_attempt
from raydist.checkpoint.group import Group
from raydist.checkpoint.journal import Journal
from raydist.checkpoint.lease import LEASE_RENEW_S, Lease
from raydist.checkpoint.manifest import Manifest, Progress
from raydist.checkpoint.objects import crc32c
from raydist.checkpoint.prune import Pruner
from raydist.checkpoint.ranges import LocalRange, TensorSpec, WantedRange, partition
from raydist.checkpoint.reads import Span
from raydist.checkpoint.restore import restore
from raydist.checkpoint.saver import RunIdentity, SaveOutcome, Saver
from raydist.errors import (
    CheckpointCorruptError,
    FencedError,
    ObjectMissingError,
    RaydistError,
)
from raydist.storage import ObjectStore

if TYPE_CHECKING:
    from simulated_run import WorkerGroup

SPEC = TensorSpec(key="master/w", shape=(NUM_BYTES,), dtype="U8")
IDENTITY = RunIdentity(
    run="toy", strategy="ddp", precision="fp32", config_hash="c", corpus="c", versions={}
)


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
