# SPDX-License-Identifier: Apache-2.0
"""When to save. Pure: rank 0 decides, the other ranks are told.

Ranks talk about saving at a look, a step that they agreed on at the look before; between two
looks a step costs nothing. Every policy is so a step number in the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from raydist.config import CheckpointConfig

Action = Literal["none", "save", "wait", "skip"]

LOOK_EVERY_S = 5.0
"""So soon a request is noticed, and an error of the work behind the steps."""

_FIRST_AUTO_S = 60.0
_MIN_AUTO_S = 30.0
_MAX_AUTO_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """What rank 0 has measured so far.

    Fields:
        step_s: Of a recent step; None before the first.
        stall_s: For which the last save held up training; None before the first.
        persist_s: Which the last save took behind it, 0 before the first.
    """

    step_s: float | None = None
    stall_s: float | None = None
    persist_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What a look comes to.

    Fields:
        action: none; save; wait for the save before, then save; skip.
        next_look: Step of the next one.
    """

    action: Action
    next_look: int


def auto_interval_s(pace: Pace, mtbf_s: float) -> float:
    """Return the seconds between saves that lose the least time to saves and failures.

    sqrt(2 C M) for a save that costs C and a failure every M. Never below the time a save takes
    behind the steps or 30 s, never above an hour; a minute until a save has been measured.

    Source: J. W. Young, CACM 17(9), 1974; J. T. Daly, FGCS 22(3), 2006, whose higher terms are
    below 1 % where C is under M / 1000.
    """
    if pace.stall_s is None:
        return _FIRST_AUTO_S
    least = max(_MIN_AUTO_S, pace.persist_s)
    return max(least, min(_MAX_AUTO_S, math.sqrt(2 * pace.stall_s * mtbf_s)))


def decide(
    config: CheckpointConfig,
    *,
    step: int,
    num_steps: int,
    since_last_s: float,
    pace: Pace,
    mtbf_s: float,
    is_requested: bool,
    is_busy: bool,
) -> Decision:
    """Decide what to do after ``step``, and when to look again.

    Args:
        config: The policies.
        step: Optimizer steps done.
        num_steps: Of the whole run. The save after the last one is not decided here: it is
            always made.
        since_last_s: Seconds since the last save or skip began, or since the start.
        pace: Measured so far.
        mtbf_s: Of the whole run: of a node over the nodes.
        is_requested: Whether someone asked for a save; it is made even where others are skipped.
        is_busy: Whether a rank still works on the save before.
    """
    every_s = auto_interval_s(pace, mtbf_s) if config.every_steps == "auto" else config.every_s
    every_steps = None if config.every_steps == "auto" else config.every_steps
    step_s = max(pace.step_s or 0.0, 1e-6)
    is_due = is_requested or (every_steps is not None and step % every_steps == 0)
    if every_s is not None and not is_due:
        is_due = since_last_s + step_s / 2 >= every_s  # the nearest step
    action: Action = "none"
    if is_due:
        action = "save"
        if is_busy:
            action = "wait" if is_requested else config.when_busy
    looks = [num_steps]
    if every_steps is not None:
        looks.append((step // every_steps + 1) * every_steps)
    waits_s = [LOOK_EVERY_S]
    if every_s is not None:
        waits_s.append(every_s if is_due else every_s - since_last_s)
    if pace.step_s is None:
        looks.append(step + 1)
    else:
        looks += [step + max(1, round(wait_s / step_s)) for wait_s in waits_s]
    return Decision(action=action, next_look=max(step + 1, min(looks)))
