# SPDX-License-Identifier: Apache-2.0
"""When a run saves, as decisions and as whole runs over a made-up clock. Nothing real."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.checkpoint.policy import LOOK_EVERY_S, Decision, Pace, auto_interval_s, decide
from raydist.config import CheckpointConfig

HOUR_S = 3600.0


def one(config: CheckpointConfig, **changes: Any) -> Decision:
    values: dict[str, Any] = {
        "step": 7, "num_steps": 1000, "since_last_s": 3.0, "pace": Pace(step_s=0.5),
        "mtbf_s": 1000 * HOUR_S, "is_requested": False, "is_busy": False,
    }  # fmt: skip
    return decide(config, **values | changes)


def saved_steps(
    config: CheckpointConfig,
    *,
    num_steps: int,
    step_s: float = 1.0,
    stall_s: float = 0.1,
    mtbf_s: float = HOUR_S,
    is_busy: Callable[[int], bool] = lambda step: False,
    requests: tuple[int, ...] = (),
) -> tuple[list[int], list[int]]:
    """Run a whole training; return the steps saved after and those looked at."""
    saved, looks = [], []
    last_s, pace, next_look, pending = 0.0, Pace(), 1, list(requests)
    for step in range(1, num_steps):
        if step < next_look:
            continue
        looks.append(step)
        is_requested = bool(pending) and pending[0] <= step
        if is_requested:
            pending.pop(0)
        decision = decide(
            config, step=step, num_steps=num_steps, since_last_s=step * step_s - last_s,
            pace=Pace(step_s=step_s, stall_s=pace.stall_s, persist_s=pace.persist_s),
            mtbf_s=mtbf_s, is_requested=is_requested,
            is_busy=is_busy(step),
        )  # fmt: skip
        assert step < decision.next_look <= num_steps
        next_look = decision.next_look
        if decision.action != "none":
            last_s = step * step_s
        if decision.action in ("save", "wait"):
            saved.append(step)
            pace = Pace(stall_s=stall_s, persist_s=2.0)
    return saved, looks


@pytest.mark.parametrize(
    ("every_steps", "num_steps", "expected"),
    [(3, 10, [3, 6, 9]), (5, 10, [5]), (1, 4, [1, 2, 3]), (100, 10, []), (None, 10, [])],
)
def test_policy_every_n_steps_saves_at_their_multiples(
    every_steps: int | None, num_steps: int, expected: list[int]
) -> None:
    config = CheckpointConfig(every_steps=every_steps)
    assert saved_steps(config, num_steps=num_steps)[0] == expected
    # Steps so short that looks are far apart, and so long that each is one, change nothing.
    assert saved_steps(config, num_steps=num_steps, step_s=1e-3)[0] == expected
    assert saved_steps(config, num_steps=num_steps, step_s=100.0)[0] == expected


def test_policy_every_t_seconds_saves_after_the_nearest_steps() -> None:
    config = CheckpointConfig(every_steps=None, every_s=60.0)
    assert saved_steps(config, num_steps=300, step_s=0.7)[0] == [86, 172, 258]
    assert saved_steps(config, num_steps=5, step_s=45.0)[0] == [1, 2, 3, 4]


def test_policy_steps_and_seconds_save_at_whichever_comes_first() -> None:
    config = CheckpointConfig(every_steps=50, every_s=30.0)
    assert saved_steps(config, num_steps=120, step_s=1.0)[0] == [30, 50, 80, 100]


def test_policy_looks_only_every_few_seconds_however_short_the_steps() -> None:
    _, looks = saved_steps(CheckpointConfig(every_steps=None), num_steps=100_000, step_s=0.01)
    assert len(looks) == pytest.approx(100_000 * 0.01 / LOOK_EVERY_S, rel=0.01)


@pytest.mark.parametrize(
    ("when_busy", "is_requested", "action"),
    [("wait", False, "wait"), ("skip", False, "skip"), ("skip", True, "wait")],
)
def test_policy_due_save_while_one_is_in_flight_is_as_configured(
    when_busy: Any, is_requested: bool, action: str
) -> None:
    config = CheckpointConfig(every_steps=7, when_busy=when_busy)
    found = one(config, is_busy=True, is_requested=is_requested)
    assert found.action == action
    assert one(config, is_busy=False).action == "save"
    assert one(config, step=8, is_busy=True).action == "none"


def test_policy_skipped_save_is_made_up_for_an_interval_later() -> None:
    config = CheckpointConfig(every_steps=None, every_s=10.0, when_busy="skip")
    saved, _ = saved_steps(config, num_steps=60, is_busy=lambda step: 8 <= step <= 25)
    assert saved == [30, 40, 50]


def test_policy_request_is_a_save_at_the_next_look_and_begins_a_new_interval() -> None:
    config = CheckpointConfig(every_steps=None, every_s=100.0)
    saved, looks = saved_steps(config, num_steps=200, requests=(32,))
    assert saved[0] == next(step for step in looks if step >= 32) < 32 + LOOK_EVERY_S
    assert saved[1:] == [saved[0] + 100]


def test_auto_interval_is_youngs_between_its_bounds() -> None:
    pace = Pace(step_s=1.0, stall_s=0.5, persist_s=10.0)
    assert auto_interval_s(pace, 10 * HOUR_S) == math.sqrt(2 * 0.5 * 36_000)
    assert auto_interval_s(pace, 1e9) == HOUR_S
    assert auto_interval_s(pace, 100.0) == 30.0
    assert auto_interval_s(Pace(stall_s=0.5, persist_s=90.0), 100.0) == 90.0
    assert auto_interval_s(Pace(), 1e9) == 60.0


@given(stall_s=st.floats(1e-3, 60), mtbf_s=st.floats(60, 1e9), other_s=st.floats(30, 3600))
def test_auto_interval_loses_no_more_than_another_within_the_bounds(
    stall_s: float, mtbf_s: float, other_s: float
) -> None:
    def lost(interval_s: float) -> float:
        return stall_s / interval_s + interval_s / (2 * mtbf_s)

    chosen = auto_interval_s(Pace(stall_s=stall_s), mtbf_s)
    assert lost(chosen) <= lost(other_s) * (1 + 1e-9)


def test_policy_auto_saves_after_a_minute_and_then_by_what_that_cost() -> None:
    config = CheckpointConfig(every_steps="auto")
    saved, _ = saved_steps(config, num_steps=1000, stall_s=2.0, mtbf_s=10 * HOUR_S)
    assert saved == [60, 439, 818]
    assert math.sqrt(2 * 2.0 * 36_000) == pytest.approx(379, abs=1)
