# SPDX-License-Identifier: Apache-2.0
"""What a start finds under a run's name, and what --resume makes of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from raydist.checkpoint import layout
from raydist.checkpoint.journal import Entry, Journal
from raydist.checkpoint.lease import refuse_if_alive
from raydist.clock import Clock
from raydist.config import RunConfig, diff_mathematics, mathematics, to_json_dict
from raydist.errors import CheckpointError, ObjectMissingError, ResumeError
from raydist.storage import ObjectStore


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """What lies under the run's name.

    Fields:
        mathematics: Of the configuration it was started with; None for a new run.
        commit: Newest commit entry; None without one.
    """

    mathematics: dict[str, Any] | None
    tail: Entry | None
    commit: Entry | None

    @property
    def step(self) -> int:
        """Step of the newest commit, 0 without one."""
        return self.commit.facts["step"] if self.commit else 0


def read_state(store: ObjectStore) -> RunState:
    """Read what a start needs to know. No listing; nothing is written.

    Raises:
        CheckpointError: The journal or the run's record cannot be read.
    """
    journal = Journal(store)
    tail = journal.tail()
    return RunState(
        mathematics=_read_mathematics(store),
        tail=tail,
        commit=journal.newest_commit(tail),
    )


def _read_mathematics(store: ObjectStore) -> dict[str, Any] | None:
    try:
        return dict(json.loads(store.get(layout.RUN_KEY))["mathematics"])
    except ObjectMissingError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            problem=f"The run's {layout.RUN_KEY} cannot be read: {error!r}.",
            way_out="Restore it from a copy of the run, or start under another --name.",
        ) from error


def decide_start(
    config: RunConfig,
    store: ObjectStore,
    *,
    clock: Clock,
    takeover: bool = False,
    allow_config_change: bool = False,
) -> RunState:
    """Refuse a start that --resume, the configuration or another driver forbids.

    Returns:
        The run's state; training begins at ``state.step``.

    Raises:
        ResumeError: The mode and what is there do not go together, or the mathematics changed.
        RunAliveError: Another driver is training this run.
    """
    state = read_state(store)
    if state.tail is not None and not takeover:
        refuse_if_alive(run=config.name, store=store, tail=state.tail, clock=clock)
    _check_mode(config, store, state)
    if state.mathematics is not None and state.commit is not None:
        _check_mathematics(config, state.mathematics, allow_config_change=allow_config_change)
    return state


def _check_mode(config: RunConfig, store: ObjectStore, state: RunState) -> None:
    name, mode = config.name, config.resume
    if mode == "must" and state.commit is None:
        raise ResumeError(
            problem=f"--resume must: run {name} has no committed checkpoint under "
            f"{config.storage}.",
            way_out="Check --name and --storage, or use --resume auto.",
        )
    if mode == "never" and state.commit is not None:
        raise ResumeError(
            problem=f"--resume never: run {name} has a committed checkpoint at step {state.step}.",
            way_out="Choose another --name, or use --resume auto.",
        )
    # With a journal they are of saves that came to nothing, as it says; without, it was lost.
    if mode == "auto" and state.tail is None:
        found = next(store.list(layout.CHECKPOINTS_PREFIX), None)
        if found is not None:
            raise ResumeError(
                problem=f"Run {name} has checkpoint objects ({found[0]}, ...) but no journal, "
                "so none is committed.",
                way_out="Use --resume never to start at step 0 all the same, or another --name.",
            )


def _check_mathematics(
    config: RunConfig, saved: dict[str, Any], *, allow_config_change: bool
) -> None:
    changed = diff_mathematics(saved, mathematics(config))
    model = [key for key in changed if key.startswith("model.") and key != "model.weights"]
    if not changed or (allow_config_change and not model):
        return
    kept = ""
    if "optimizer.decay_steps" in changed:
        old = changed["optimizer.decay_steps"][0]
        kept = f" The schedule follows num_steps; --optimizer.decay-steps {old} keeps it."
    lines = "\n".join(f"    {key}: {old!r} -> {new!r}" for key, (old, new) in changed.items())
    raise ResumeError(
        problem=f"Run {config.name} was started with other mathematics:\n{lines}",
        way_out="Choose another --name: weights of another model cannot be loaded."
        if model
        else "Set these back, choose another --name, or say --allow-config-change." + kept,
    )


def write_run(
    store: ObjectStore, config: RunConfig, *, versions: dict[str, str], revision: str, clock: Clock
) -> None:
    """Record the resolved configuration of this start, after ``decide_start`` allowed it."""
    record = {
        "format": 1,
        "written_unix_s": clock.now_unix_s(),
        "config": to_json_dict(config),
        "mathematics": mathematics(config),
        "versions": versions,
        "revision": revision,
    }
    store.put(layout.RUN_KEY, json.dumps(record, indent=1).encode())
