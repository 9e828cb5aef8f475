# SPDX-License-Identifier: Apache-2.0
"""Learning rate as a function of updates. Nothing is faked."""

from __future__ import annotations

import math
from typing import Any

import pytest

from raydist.testing.configs import small_config
from raydist.train.schedule import learning_rate


def _rates(count: int, **changes: Any) -> list[float]:
    changes = {"optimizer.learning_rate": 1.0, **changes}
    config = small_config(**changes)
    return [learning_rate(config, updates=updates) for updates in range(count)]


def test_warmup_rises_in_equal_steps_to_the_peak() -> None:
    rates = _rates(6, num_steps=100, **{"optimizer.warmup_steps": 5})
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5] == 1.0


def test_warmup_of_zero_steps_begins_at_the_peak() -> None:
    assert _rates(1) == [1.0]


def test_cosine_has_its_formulas_values_and_ends_at_the_floor() -> None:
    rates = _rates(
        13, num_steps=12,
        **{"optimizer.warmup_steps": 4, "optimizer.min_learning_rate_ratio": 0.2},
    )  # fmt: skip
    assert rates[4] == 1.0
    assert rates[8] == pytest.approx(0.6)  # half way down to 0.2
    assert rates[6] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert rates[12] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_linear_falls_in_equal_steps_to_the_floor() -> None:
    rates = _rates(11, **{"optimizer.schedule": "linear", "optimizer.min_learning_rate_ratio": 0.0})
    assert rates == pytest.approx([1 - n / 10 for n in range(11)])


def test_constant_stays_at_the_peak_for_ever() -> None:
    rates = _rates(50, **{"optimizer.schedule": "constant", "optimizer.warmup_steps": 2})
    assert rates == [0.5] + [1.0] * 49


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_updates_past_the_end_stay_at_the_floor(schedule: str, floor: float) -> None:
    config = small_config(
        **{"optimizer.schedule": schedule, "optimizer.min_learning_rate_ratio": floor}
    )
    for updates in (10, 11, 10**9):
        rate = learning_rate(config, updates=updates)
        assert rate == pytest.approx(1e-3 * floor, abs=1e-18)


def test_decay_steps_move_the_end_of_the_schedule_only() -> None:
    shorter = _rates(12, num_steps=40, **{"optimizer.decay_steps": 10})
    assert shorter == _rates(12, num_steps=10)
    assert shorter[10] == shorter[11] == pytest.approx(0.1)


def test_warmup_as_long_as_the_schedule_reaches_peak_then_floor() -> None:
    rates = _rates(12, **{"optimizer.warmup_steps": 10})
    assert rates[9] == 1.0
    assert rates[11] == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_every_rate_lies_between_floor_and_peak(schedule: str) -> None:
    rates = _rates(
        300, num_steps=200, **{"optimizer.schedule": schedule, "optimizer.warmup_steps": 20}
    )
    assert all(0.1 - 1e-12 <= rate <= 1.0 for rate in rates[20:])
    assert all(0 < rate <= 1.0 for rate in rates)


def test_rate_does_not_depend_on_how_the_batch_is_split() -> None:
    splits = [
        {"batch.micro_batch_size": 1},
        {"batch.micro_batch_size": 8},
        {"scaling.workers": 4},
        {"strategy": "ddp"},
    ]
    base = _rates(12, **{"optimizer.warmup_steps": 3})
    for split in splits:
        assert _rates(12, **{"optimizer.warmup_steps": 3}, **split) == base
