# SPDX-License-Identifier: Apache-2.0
"""What a plot needs of a series of numbers: fewer points, a smooth line, round ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

Point = tuple[float, float]


def downsample(points: Sequence[Point], max_points: int) -> list[Point]:
    """Thin a series so that its shape stays: the lowest and highest point of each slice remain.

    Args:
        points: (x, y), x rising.
        max_points: Most points to return, at least 4; the first and the last are among them.
    """
    if len(points) <= max_points:
        return list(points)
    inner = points[1:-1]
    num_slices = max_points // 2 - 1
    kept = [points[0]]
    for i in range(num_slices):
        start, end = (len(inner) * k // num_slices for k in (i, i + 1))
        in_slice = range(start, end)
        lowest = min(in_slice, key=lambda k: inner[k][1])
        highest = max(in_slice, key=lambda k: inner[k][1])
        kept += [inner[k] for k in sorted({lowest, highest})]
    return [*kept, points[-1]]


def smooth(values: Sequence[float], half_window: int) -> list[float]:
    """Average each value with up to ``half_window`` neighbours on each side.

    Near the start fewer are taken, on both sides alike: a loss falls fastest there, and an
    average over one side only would bend the line.
    """
    sums = [0.0, *accumulate(values)]
    smoothed: list[float] = []
    for i in range(len(values)):
        half = min(half_window, i // 3)
        start, end = i - half, min(i + half + 1, len(values))
        smoothed.append((sums[end] - sums[start]) / (end - start))
    return smoothed


def nice_ticks(low: float, high: float, *, num_ticks: int, whole: bool = False) -> list[float]:
    """Return about ``num_ticks`` round values within [low, high], 1, 2 or 5 x 10^n apart.

    Args:
        low: Lower end of the axis.
        high: Upper end of the axis, above ``low``.
        num_ticks: Ticks wanted.
        whole: Whether only whole numbers make sense.
    """
    rough = (high - low) / num_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))
    if whole:
        distance = max(1.0, distance)
    first, last = math.ceil(low / distance - 1e-9), math.floor(high / distance + 1e-9)
    return [k * distance for k in range(first, last + 1)]


def tick_label(value: float, ticks: Sequence[float]) -> str:
    """Return a tick's text, with as many digits as tell it from its neighbours."""
    distance = ticks[1] - ticks[0] if len(ticks) > 1 else abs(value) or 1.0
    digits = max(0, -math.floor(math.log10(distance) + 1e-9))
    return f"{value:,.{digits}f}"
