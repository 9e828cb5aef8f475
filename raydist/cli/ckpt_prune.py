# SPDX-License-Identifier: Apache-2.0
"""`raydist ckpt prune RUN`: end old checkpoints and collect what belongs to none."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro

from raydist.checkpoint.attempt import open_attempt
from raydist.checkpoint.journal import Journal
from raydist.checkpoint.prune import Pruner, decide_retention
from raydist.checkpoint.retention import Decision, RetentionPolicy
from raydist.clock import SystemClock
from raydist.errors import CheckpointError, ConfigError
from raydist.storage import open_store


@dataclass(frozen=True, kw_only=True, slots=True)
class Prune:
    """End old checkpoints of a run that is not being trained, and collect leftovers.

    It takes the run for a moment, so a job of this run that waits to be restarted is replaced
    for good. A job prunes by itself: checkpoint.keep_last.
    """

    location: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Directory or s3:// location of the run: <storage>/<name>."""
    keep_last: int | None = None
    """Newest checkpoints that stay; all when left out, and then only leftovers are collected."""
    keep_every_steps: int | None = None
    """Checkpoints of steps divisible by it stay too."""
    dry_run: bool = False
    """Only say what would be ended; nothing is written."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        """Do it and say what it did.

        Raises:
            ConfigError: There is no run at that location.
            RunAliveError: It is being trained.
            CheckpointError: It could not be finished; said again, it goes on.
        """
        store = open_store(self.location)
        policy = RetentionPolicy(keep_last=self.keep_last, keep_every_steps=self.keep_every_steps)
        journal = Journal(store)
        tail = journal.tail()
        if tail is None:
            raise ConfigError(
                problem=f"There is no journal at {self.location}.",
                way_out="Name the run's own location: <storage>/<name>.",
            )
        if self.dry_run:
            self._say(decide_retention(store, list(journal.commits(tail)), policy))
            return 0
        attempt = open_attempt(
            run=self.location,
            store=store,
            driver=f"prune-{uuid.uuid4().hex}",
            clock=SystemClock(),
            seen_attempt=tail.attempt,
        )
        try:
            pruner = Pruner(store=store, attempt=attempt, policy=policy)
            plan = pruner.decide()
            outcome = pruner.after_commit()
            attempt.close("pruned by hand")
        finally:
            attempt.release()
        if self.json:
            print(json.dumps({"decisions": _json(plan), "outcome": asdict(outcome)}, indent=1))
        else:
            self._say(plan)
            print(f"{outcome.num_deleted} objects deleted, {outcome.bytes_deleted / 2**20:.1f} MiB")
        if outcome.problem:
            raise CheckpointError(
                problem=f"Pruning stopped: {outcome.problem}", way_out="Say it again to go on."
            )
        return 0

    def _say(self, plan: list[Decision]) -> None:
        if self.json:
            if self.dry_run:
                print(json.dumps({"decisions": _json(plan)}, indent=1))
            return
        for decision in plan:
            verb = "keep" if decision.keep else "prune"
            step = decision.commit.facts["step"]
            print(f"{verb:<6} step {step:>8}  attempt {decision.commit.attempt}  {decision.reason}")


def _json(plan: list[Decision]) -> list[dict[str, object]]:
    return [
        {
            "step": decision.commit.facts["step"],
            "attempt": decision.commit.attempt,
            "keep": decision.keep,
            "reason": decision.reason,
        }
        for decision in plan
    ]
