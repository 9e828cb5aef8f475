# SPDX-License-Identifier: Apache-2.0
"""`raydist ckpt save RUN`: have a run that is training save now, and wait until it has."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import tyro

from raydist.checkpoint.journal import Entry, Journal
from raydist.checkpoint.requests import request_save
from raydist.clock import Clock, SystemClock
from raydist.errors import CheckpointError, ConfigError, FailureKind
from raydist.storage import ObjectStore, open_store

_LOOK_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """Ask a run that is training for a save, and wait until it is committed."""

    location: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Directory or s3:// location of the run: <storage>/<name>."""
    timeout_s: float = 600.0
    """How long to wait for it; the request stands after that."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        """Ask and wait."""
        return save(self, open_store(self.location), clock=SystemClock())


def save(command: Save, store: ObjectStore, *, clock: Clock) -> int:
    """Leave the request, wait for what the journal says of it; status 5 for an abandoned save.

    Raises:
        ConfigError: The run does not train: it has no journal, or its last attempt has ended.
        CheckpointError: Nothing came in time, or the attempt ended first.
    """
    journal = Journal(store)
    tail = journal.tail()
    if tail is None or tail.kind == "closed":
        what = "has never trained" if tail is None else "does not train: its last attempt ended"
        raise ConfigError(
            problem=f"The run at {command.location} {what}.",
            way_out="Name the location of a run in training: <storage>/<name>.",
        )
    request_save(store, clock=clock)
    entry = _wait(journal, tail, command, clock)
    facts = {"step": entry.facts["step"], "committed": entry.kind == "committed"}
    if entry.kind == "committed":
        facts["manifest"] = entry.facts["manifest"]
        text = f"step {entry.facts['step']} is committed: {entry.facts['manifest']}"
    else:
        facts["why"] = entry.facts["why"]
        text = f"the save at step {entry.facts['step']} was abandoned: {entry.facts['why']}"
    print(json.dumps(facts) if command.json else text)
    return 0 if entry.kind == "committed" else FailureKind.STORAGE.exit_code


def _wait(journal: Journal, tail: Entry, command: Save, clock: Clock) -> Entry:
    number = tail.number + 1
    deadline = clock.monotonic_s() + command.timeout_s
    while clock.monotonic_s() < deadline:
        entry = journal.read(number)
        if entry is None:
            clock.sleep(_LOOK_EVERY_S)
            continue
        if entry.kind in ("committed", "abandoned"):
            return entry
        if entry.kind == "closed":
            raise CheckpointError(
                problem="The run ended before it saved.", way_out="Look at it with `ckpt ls`."
            )
        number += 1
    raise CheckpointError(
        problem=f"No save within {command.timeout_s:g} s; the request stands.",
        way_out="Is the run alive? It looks for requests every few seconds, between two steps.",
    )
