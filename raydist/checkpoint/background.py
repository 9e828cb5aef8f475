# SPDX-License-Identifier: Apache-2.0
"""Saves behind the training: a copy of the state is taken, the rest is done by a thread.

Training meets the work in two places only, both on the training's own thread and in the same
step on all ranks: ``agree`` and ``save``. What fails behind the steps is raised by ``agree``.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from raydist.checkpoint.group import Group
from raydist.checkpoint.manifest import Progress
from raydist.checkpoint.ranges import WantedRange
from raydist.checkpoint.saver import SaveOutcome, Saver
from raydist.checkpoint.snapshot import Allocate, Snapshot, touched_memory
from raydist.errors import CheckpointError, FencedError, RankFailedError, RaydistError

T = TypeVar("T")

Export = Callable[[dict[str, memoryview]], dict[str, float]]
"""Copies a rank's live state into its views and returns the optimizer's scalars."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A save that is over, for better or worse.

    Fields:
        persist_s: Seconds behind the steps, from the snapshot to the agreement.
    """

    outcome: SaveOutcome
    persist_s: float


class BackgroundSaver:
    """One rank's saves, one in flight at most. All ranks hold one.

    The snapshot's memory is made at once, behind the first steps.

    Args:
        saver: Writes and commits; over a group of its own, never the training's.
        group: The training's: its collectives and these calls come in one order.
        ranges: What this rank saves, the same at every save.
        allocate: Where the snapshot's memory comes from.
        committed: Told of each commit (step, manifest key) from the saving thread.
    """

    def __init__(
        self,
        *,
        saver: Saver,
        group: Group,
        ranges: Sequence[WantedRange],
        committed: Callable[[int, str], None],
        allocate: Allocate = touched_memory,
    ) -> None:
        self._saver = saver
        self._group = group
        self._ranges = ranges
        self._committed = committed
        self._allocate = allocate
        self._snapshot: Snapshot | None = None
        self._error: RaydistError | None = None
        self._finished: deque[Finished] = deque()
        self._step = 0
        self._thread = self._run(self._prepare)

    @property
    def is_busy(self) -> bool:
        """Whether this rank still works on a save."""
        return self._thread.is_alive()

    def agree(self, decide: Callable[[bool], T]) -> T:
        """Return what rank 0 decides. All ranks; a barrier.

        Args:
            decide: Given whether any rank is busy; called on rank 0 only.

        Raises:
            RaydistError: What the work behind the steps came to on some rank, on every rank.
        """
        state = {"busy": self.is_busy, "error": self._error}
        states = self._group.gather(state)
        box: dict[str, Any] = {}
        if states is not None:
            errors = [s["error"] for s in states if s["error"] is not None]
            # Who was replaced says so, whatever else came of it.
            errors.sort(key=lambda error: not isinstance(error, FencedError))
            if errors:
                box = {"error": errors[0]}
            else:
                box = {"value": decide(any(s["busy"] for s in states))}
        box = self._group.broadcast(box)
        if "error" in box:
            raise box["error"]
        return box["value"]

    def save(self, export: Export, *, progress: Progress) -> None:
        """Copy the state and go on; the rest is done behind. All ranks, none busy.

        Raises:
            CheckpointError: The save before is not over; ``wait`` for it first.
        """
        if self.is_busy:
            raise CheckpointError(
                problem=f"The save of step {progress.step} began before that of step "
                f"{self._step} was over."
            )
        self._step = progress.step
        scalars: dict[str, float] = {}
        part: Snapshot | RaydistError
        try:
            part = self._snapshot or self._make()
            scalars = export(part.views)
        except RaydistError as error:
            part = error
        except MemoryError as error:
            part = CheckpointError(problem=f"No memory for the snapshot: {error!r}.")
        self._thread = self._run(lambda: self._persist(part, progress, scalars))

    def wait(self, limit_s: float | None = None) -> bool:
        """Wait until this rank is not busy, ``limit_s`` at most; returns whether it is not."""
        self._thread.join(limit_s)
        return not self.is_busy

    def take_finished(self) -> list[Finished]:
        """Return the saves that ended since the last call."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def _make(self) -> Snapshot:
        self._snapshot = Snapshot(self._ranges, allocate=self._allocate)
        return self._snapshot

    def _prepare(self) -> None:
        try:
            self._make()
        except MemoryError:
            return  # The first save tries again, and says so when it cannot.

    def _persist(
        self, part: Snapshot | RaydistError, progress: Progress, scalars: dict[str, float]
    ) -> None:
        begun = time.monotonic()
        outcome = self._saver.persist(part, progress=progress, scalars=scalars)
        if outcome.committed:
            self._committed(outcome.step, outcome.manifest_key)
        persist_s = time.monotonic() - begun
        self._finished.append(Finished(outcome=outcome, persist_s=persist_s))

    def _run(self, work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except RaydistError as error:
                self._error = error
            except Exception as error:
                self._error = RankFailedError(
                    rank=self._group.rank,
                    error=type(error).__name__,
                    step=self._step,
                    is_collateral=False,
                    text="".join(traceback.format_exception(error)).rstrip(),
                )

        thread = threading.Thread(target=guarded, name="raydist-save", daemon=True)
        thread.start()
        return thread
