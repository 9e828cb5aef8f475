# SPDX-License-Identifier: Apache-2.0
"""Thinning, smoothing and ticks."""

from __future__ import annotations

import pytest

from raydist.metrics.series import downsample, nice_ticks, smooth, tick_label


def test_a_short_series_is_left_alone() -> None:
    points = [(float(i), 0.0) for i in range(10)]
    assert downsample(points, 10) == points


def test_a_long_series_keeps_its_ends_its_peak_and_its_dip() -> None:
    values = [float((i * 7919) % 100) for i in range(50_000)]
    values[31_337], values[40_000] = 1000.0, -1000.0
    points = [(float(i), value) for i, value in enumerate(values)]
    thinned = downsample(points, 2000)
    assert len(thinned) == 2000
    assert thinned == sorted(thinned)
    assert {points[0], points[31_337], points[40_000], points[-1]} <= set(thinned)


@pytest.mark.parametrize("num_points", [5, 6, 7, 100])
def test_thinning_never_exceeds_its_limit(num_points: int) -> None:
    thinned = downsample([(float(i), float(i % 3)) for i in range(num_points)], 4)
    assert 3 <= len(thinned) <= 4


def test_smoothing_keeps_a_constant_and_averages_noise() -> None:
    assert smooth([2.0] * 50, 5) == pytest.approx([2.0] * 50)
    smoothed = smooth([1.0, 3.0] * 50, 10)
    assert smoothed[60] == pytest.approx(2.0, abs=0.1)


def test_smoothing_leaves_the_steep_start_where_it_is() -> None:
    values = [10.0, 5.0, 4.0] + [3.0] * 50
    assert smooth(values, 10)[:3] == pytest.approx(values[:3])


def test_smoothing_of_few_values_changes_nothing() -> None:
    assert smooth([], 3) == []
    assert smooth([4.0], 0) == [4.0]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 300.0, [0, 50, 100, 150, 200, 250, 300]),
        (1.9, 5.8, [2, 3, 4, 5]),
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-1e-6, 1e-6, [-1e-6, -5e-7, 0.0, 5e-7, 1e-6]),
    ],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high, num_ticks=6) == pytest.approx(ticks)


def test_steps_get_whole_ticks_only() -> None:
    assert nice_ticks(99.0, 101.0, num_ticks=8, whole=True) == [99, 100, 101]


@pytest.mark.parametrize(
    ("ticks", "labels"),
    [
        ([0.0, 0.2, 0.4], ["0.0", "0.2", "0.4"]),
        ([2.0, 3.0], ["2", "3"]),
        ([2.25, 2.3], ["2.25", "2.30"]),
        ([0.0, 50_000.0], ["0", "50,000"]),
        ([0.0], ["0"]),
    ],
)
def test_labels_have_the_digits_that_tell_ticks_apart(
    ticks: list[float], labels: list[str]
) -> None:
    assert [tick_label(tick, ticks) for tick in ticks] == labels
