# SPDX-License-Identifier: Apache-2.0
"""What is left of a run for people: the loss curve beside the metrics, and a summary."""

from __future__ import annotations

import json
import math

from raydist.checkpoint.runs import read_state
from raydist.config import RunConfig
from raydist.errors import ObjectMissingError, StorageError
from raydist.launch.launcher import RunResult
from raydist.metrics.curve import render_curve
from raydist.metrics.history import read_history
from raydist.storage import ObjectStore

CURVE_KEY = "metrics/loss.html"


def write_curve(store: ObjectStore, config: RunConfig) -> str | None:
    """Draw all attempts' losses; returns the key, or None when there is nothing to draw."""
    try:
        rows = read_history(store).rows
        if not rows:
            return None
        page = render_curve(
            rows, title=config.name, baseline_loss=math.log(config.model.vocab_size)
        )
        store.put(CURVE_KEY, page.encode())
    except StorageError:
        return None  # The metrics themselves stand; `raydist report` can draw them later.
    return CURVE_KEY


def summarize(store: ObjectStore, config: RunConfig, run_url: str, log: str) -> str:
    """Return the closing lines of a finished run: what it did and where everything lies."""
    lines = []
    state = read_state(store)
    attempt = state.tail.attempt if state.tail else 0
    try:
        outcome = json.loads(store.get(f"report/attempt-{attempt:04d}.json"))
    except ObjectMissingError:
        outcome = None
    if outcome is not None:
        first = math.log(config.model.vocab_size)
        loss = f"loss {outcome['loss']:.3f} (ln vocab {first:.2f})" if outcome["loss"] else ""
        lines.append(
            f"finished {outcome['step']} steps, {outcome['tokens']:,} tokens, {loss}, "
            f"attempt {attempt}, {outcome['seconds']:.0f} s in it"
        )
        if outcome["skipped_steps"]:
            lines.append(f"  skipped     {outcome['skipped_steps']} non-finite steps")
    lines += [
        f"  run         {run_url}",
        f"  checkpoint  {state.commit.facts['manifest'] if state.commit else 'none'}",
        f"  metrics     metrics/attempt-{attempt:04d}.jsonl, curve {CURVE_KEY}",
        f"  log         {log}",
    ]
    if outcome is not None and outcome["sample"]:
        lines += ["  sample:", *(f"    | {line}" for line in outcome["sample"].splitlines())]
    return "\n".join(lines)


def result_of(store: ObjectStore, run_url: str) -> RunResult:
    """Return the result of a finished run from its storage."""
    state = read_state(store)
    loss = None
    if state.tail is not None:
        try:
            loss = json.loads(store.get(f"report/attempt-{state.tail.attempt:04d}.json"))["loss"]
        except ObjectMissingError:
            loss = None
    return RunResult(run_url=run_url, step=state.step, loss=loss)
