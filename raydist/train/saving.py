# SPDX-License-Identifier: Apache-2.0
"""A rank's saves as the loop sees them: called after every step, mostly for nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType

import torch

from raydist.checkpoint.attempt import Attempt
from raydist.checkpoint.background import BackgroundSaver, Export
from raydist.checkpoint.group import Group
from raydist.checkpoint.manifest import Progress
from raydist.checkpoint.policy import Decision, Pace, auto_interval_s, decide
from raydist.checkpoint.prune import Pruner
from raydist.checkpoint.requests import RequestWatch
from raydist.checkpoint.saver import RunIdentity, Saver
from raydist.checkpoint.snapshot import touched_memory
from raydist.clock import Clock
from raydist.config import RunConfig
from raydist.errors import RaydistError
from raydist.storage import ObjectStore
from raydist.train import rng
from raydist.train.engine import Engine
from raydist.train.loop import SaveFigures, TrainState
from raydist.train.store_group import StoreGroup
from raydist.train.tensors import pinned_memory
from raydist.world import World

_SAY_INTERVAL_CHANGE = 1.25
_CLOSE_WAIT_S = 10.0


@dataclass(kw_only=True)
class _RankZero:
    """What only rank 0 keeps, to decide."""

    pace: Pace
    last_save_s: float
    last_look_s: float
    last_look_step: int
    said_interval_s: float = 0.0


class Saving:
    """Decides with the other ranks when to save, and lets ``background`` do it. All ranks.

    Args:
        config: The run; its checkpoint section decides, with fault.node_mtbf_hours.
        background: Holds the snapshot and the thread.
        export: Copies the live state.
        progress: The record of a state.
        num_nodes: Of the run.
        step: Where this attempt begins.
        clock: Rank 0's decides for all.
        say: For people; every rank calls it.
        take_request: Whether someone asked for a save since the last call; called on rank 0.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        background: BackgroundSaver,
        export: Export,
        progress: Callable[[TrainState], Progress],
        num_nodes: int,
        step: int,
        clock: Clock,
        say: Callable[[str], None],
        take_request: Callable[[], bool],
    ) -> None:
        self._config = config
        self._background = background
        self._export = export
        self._progress = progress
        self._mtbf_s = config.fault.node_mtbf_hours * 3600 / num_nodes
        self._clock = clock
        self._say = say
        self._take_request = take_request
        now = clock.monotonic_s()
        self._zero = _RankZero(pace=Pace(), last_save_s=now, last_look_s=now, last_look_step=step)
        self._next_look = step + 1
        self._persist_s = 0.0
        self.committed_step = 0

    def after_step(self, state: TrainState) -> SaveFigures:
        """Save if it is time; the figures go into the next step's row. All ranks.

        After the last step the state is saved whatever the policies say, and waited for; a save
        that is abandoned is tried again until ``checkpoint.max_abandoned`` is spent, since no
        later one makes up for it.

        Raises:
            RaydistError: What an earlier save came to, the same on every rank.
        """
        is_last = state.step >= self._config.num_steps
        figures = SaveFigures()
        if is_last or state.step >= self._next_look:
            figures = self._look(state, is_last=is_last)
        if is_last:
            figures = self._finish(state, figures)
        self._note_finished()
        persist_s, self._persist_s = self._persist_s, 0.0
        return replace(figures, persist_s=persist_s)

    def close(self, *, is_agreed: bool) -> None:
        """Let the save in flight end: an attempt that stops has it still to lose.

        Args:
            is_agreed: Whether all ranks stop; otherwise others may never come to the agreement,
                and it is waited for briefly.
        """
        self._background.wait(None if is_agreed else _CLOSE_WAIT_S)

    def _look(self, state: TrainState, *, is_last: bool) -> SaveFigures:
        begun = self._clock.monotonic_s()
        decision = self._background.agree(lambda is_busy: self._decide(state, is_busy, is_last))
        self._next_look = decision.next_look
        if decision.action in ("none", "skip"):
            return SaveFigures(save_skipped=decision.action == "skip")
        wait_s = 0.0
        if decision.action == "wait":
            self._settle()
            wait_s = self._clock.monotonic_s() - begun
        self._background.save(self._export, progress=self._progress(state))
        now = self._clock.monotonic_s()
        stall_s = now - begun - wait_s
        self._zero.pace = replace(self._zero.pace, stall_s=stall_s)
        self._zero.last_look_s = now
        return SaveFigures(save_s=stall_s, save_wait_s=wait_s)

    def _settle(self) -> None:
        """Wait for every rank's save; all ranks."""
        self._background.wait()
        while self._background.agree(lambda is_busy: is_busy):
            self._background.wait()

    def _finish(self, state: TrainState, figures: SaveFigures) -> SaveFigures:
        """Wait for the last save, and save again until it is committed."""
        begun = self._clock.monotonic_s()
        self._settle()
        self._note_finished()
        while self._background.agree(lambda _: self.committed_step < state.step):
            self._background.save(self._export, progress=self._progress(state))
            self._settle()
            self._note_finished()
        return replace(figures, save_wait_s=figures.save_wait_s + self._clock.monotonic_s() - begun)

    def _decide(self, state: TrainState, is_busy: bool, is_last: bool) -> Decision:
        zero, now = self._zero, self._clock.monotonic_s()
        steps = state.step - zero.last_look_step
        zero.pace = replace(zero.pace, step_s=(now - zero.last_look_s) / max(1, steps))
        decision = decide(
            self._config.checkpoint,
            step=state.step,
            num_steps=self._config.num_steps,
            since_last_s=now - zero.last_save_s,
            pace=zero.pace,
            mtbf_s=self._mtbf_s,
            is_requested=self._take_request(),
            is_busy=is_busy,
        )
        if is_last:
            decision = replace(decision, action="wait" if is_busy else "save")
        self._say_interval()
        if decision.action == "skip":
            self._say(f"save at step {state.step} skipped: the one before is not over")
        if decision.action != "none":
            zero.last_save_s = now
        zero.last_look_s, zero.last_look_step = now, state.step
        return decision

    def _say_interval(self) -> None:
        zero = self._zero
        if self._config.checkpoint.every_steps != "auto" or zero.pace.stall_s is None:
            return
        interval_s = auto_interval_s(zero.pace, self._mtbf_s)
        ratio = interval_s / zero.said_interval_s if zero.said_interval_s else 0.0
        if not 1 / _SAY_INTERVAL_CHANGE < ratio < _SAY_INTERVAL_CHANGE:
            zero.said_interval_s = interval_s
            self._say(
                f"checkpoint.every_steps=auto: a save every {interval_s:.0f} s (a save stalls "
                f"{zero.pace.stall_s:.3f} s, a failure every {self._mtbf_s / 3600:.0f} h)"
            )

    def _note_finished(self) -> None:
        for finished in self._background.take_finished():
            outcome = finished.outcome
            self._persist_s = finished.persist_s
            self._zero.pace = replace(self._zero.pace, persist_s=finished.persist_s)
            if outcome.committed:
                self.committed_step = outcome.step
            else:
                self._say(f"save at step {outcome.step} abandoned: {outcome.why}")


def start_saving(
    stack: ExitStack,
    *,
    store: ObjectStore,
    group: Group,
    attempt: Attempt | None,
    attempt_number: int,
    identity: RunIdentity,
    engine: Engine,
    config: RunConfig,
    world: World,
    step: int,
    progress: Callable[[TrainState], Progress],
    clock: Clock,
    say: Callable[[str], None],
    committed: Callable[[int, str], None],
    pruner: Pruner | None,
) -> Saving:
    """Return what saves this rank's state in this attempt. All ranks.

    Args:
        stack: Ends the saving with the attempt.
        store: Rooted at the run.
        group: The training's.
        attempt: On rank 0, None elsewhere.
        attempt_number: The same on all ranks.
        identity: For the manifests.
        engine: Holds the state.
        config: The run.
        world: This rank's place.
        step: Where the attempt begins.
        progress: The record of a state.
        clock: Times the saves.
        say: For people; every rank calls it.
        committed: Told of each commit, from the saving thread.
        pruner: Ends checkpoints after a commit; rank 0's.
    """
    rank, world_size = world.rank, world.world_size
    saver = Saver(
        store=store,
        group=StoreGroup(
            f"raydist-save-{attempt_number}",
            timeout_s=config.checkpoint.agree_timeout_s,
            rank=rank,
            world_size=world_size,
        ),
        attempt_number=attempt_number,
        attempt=attempt,
        identity=identity,
        max_abandoned=config.checkpoint.max_abandoned,
        pruner=pruner,
    )

    def export(buffers: dict[str, memoryview]) -> dict[str, float]:
        rng.export(buffers, rank=rank, world_size=world_size)
        return engine.export(buffers)

    watch = RequestWatch(store) if world.is_main else None
    if watch is not None:
        stack.callback(watch.close)
    saving = Saving(
        config=config,
        background=BackgroundSaver(
            saver=saver,
            group=group,
            ranges=engine.wanted() + rng.held(rank=rank, world_size=world_size),
            committed=committed,
            allocate=pinned_memory if torch.cuda.is_available() else touched_memory,
        ),
        export=export,
        progress=progress,
        num_nodes=world.num_nodes,
        step=step,
        clock=clock,
        say=say,
        take_request=watch.take if watch is not None else lambda: False,
    )

    def close(
        kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        saving.close(is_agreed=error is None or isinstance(error, RaydistError))

    stack.push(close)
    return saving
