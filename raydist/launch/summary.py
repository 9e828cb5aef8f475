# SPDX-License-Identifier: Apache-2.0
"""What is left of a run for people: the loss curve beside the metrics, and a summary."""

from __future__ import annotations

import json
import math

from raydist.checkpoint import layout
from raydist.checkpoint.runs import read_state
from raydist.config import RunConfig
from raydist.errors import ObjectMissingError, StorageError
from raydist.launch.launcher import RunResult
from raydist.metrics.curve import render_curve
from raydist.metrics.history import read_history
from raydist.storage import ObjectStore

CURVE_KEY = "metrics/loss.html"


def write_curve(store: ObjectStore, config: RunConfig) -> str:
    """Draw all attempts' losses; returns where the drawing lies, or why there is none."""
    try:
        rows = read_history(store).rows
        if not rows:
            return "no curve: no step was done"
        page = render_curve(
            rows, title=config.name, baseline_loss=math.log(config.model.vocab_size)
        )
        store.put(CURVE_KEY, page.encode())
    except StorageError as error:
        return f"no curve: {error}"
    return f"curve {CURVE_KEY}"


def summarize(
    store: ObjectStore, config: RunConfig, *, curve: str, log: str
) -> tuple[RunResult, str]:
    """Return the result of a finished run, and the closing lines that tell of it."""
    state = read_state(store)
    attempt = state.tail.attempt if state.tail else 0
    try:
        outcome = json.loads(store.get(layout.outcome_key(attempt)))
    except ObjectMissingError:
        outcome = {"loss": None, "sample": "", "skipped_steps": 0}
    lines = [f"finished {state.step} steps"]
    if "tokens" in outcome:
        lines[0] += f", {outcome['tokens']:,} tokens"
    if outcome["loss"] is not None:
        baseline = math.log(config.model.vocab_size)
        lines[0] += f", loss {outcome['loss']:.3f} (ln vocab {baseline:.2f})"
    if "seconds" in outcome:
        lines[0] += f", attempt {attempt}, {outcome['seconds']:.0f} s in it"
    if outcome["skipped_steps"]:
        lines.append(f"  skipped     {outcome['skipped_steps']} non-finite steps")
    lines += [
        f"  run         {config.run_url}",
        f"  checkpoint  {state.commit.facts['manifest'] if state.commit else 'none'}",
        f"  metrics     metrics/attempt-{attempt:04d}.jsonl, {curve}",
        f"  log         {log}",
    ]
    if outcome["sample"]:
        lines += ["  sample:", *(f"    | {line}" for line in outcome["sample"].splitlines())]
    result = RunResult(run_url=config.run_url, step=state.step, loss=outcome["loss"])
    return result, "\n".join(lines)
