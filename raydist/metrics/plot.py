# SPDX-License-Identifier: Apache-2.0
"""The loss curve as inline SVG, drawn from rows; colours come from the page's style."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from raydist.metrics.history import MergedHistory, Row
from raydist.metrics.rows import is_skipped
from raydist.metrics.series import Point, downsample, nice_ticks, smooth, tick_label

MAX_POINTS = 2000

_WIDTH, _HEIGHT = 960, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 930, 30, 375
_LABEL_SPACING = 72  # room that "attempt 12" takes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """Maps steps and losses into the plot."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    @classmethod
    def around(
        cls, steps: Sequence[int], losses: Sequence[float], baseline: float | None
    ) -> _Frame:
        low, high = float(min(steps)), float(max(steps))
        if low < high / 10:
            low = 0.0
        if low == high:
            low, high = low - 1, high + 1
        shown = [] if baseline is None else [baseline]
        if losses:
            # A spike of a few steps is cut off at the top; it must not flatten the rest.
            usual = sorted(losses)[int(len(losses) * 0.99)]
            shown += [min(losses), min(max(losses), 2 * abs(usual) + 1)]
        shown = shown or [0.0]
        margin = (max(shown) - min(shown)) * 0.06 or 0.5
        return cls(x_low=low, x_high=high, y_low=min(shown) - margin, y_high=max(shown) + margin)

    def x(self, step: float) -> float:
        return _LEFT + (step - self.x_low) / (self.x_high - self.x_low) * (_RIGHT - _LEFT)

    def y(self, loss: float) -> float:
        share = (loss - self.y_low) / (self.y_high - self.y_low)
        return _BOTTOM - share * (_BOTTOM - _TOP)

    def points(self, series: Sequence[Point]) -> str:
        return " ".join(f"{self.x(step):.1f},{self.y(loss):.1f}" for step, loss in series)


def draw_curve(
    rows: Sequence[Row], merged: MergedHistory, losses: Sequence[Point], baseline: float | None
) -> str:
    """Return the figure of a run with at least one row, as HTML.

    Args:
        rows: Rows of all attempts.
        merged: The same, one per step.
        losses: (step, loss) of the merged rows whose loss is finite.
        baseline: Loss to draw a dashed line at, or None.
    """
    frame = _Frame.around([row["step"] for row in merged.rows], [y for _, y in losses], baseline)
    capped = [(step, min(loss, frame.y_high)) for step, loss in losses]
    smoothed = smooth([loss for _, loss in capped], half_window=len(capped) // 50)
    line = [(step, loss) for (step, _), loss in zip(capped, smoothed, strict=True)]
    parts = [*_axes(frame), *_restarts(frame, rows)]
    if baseline is not None:
        parts += _baseline(frame, baseline)
    for name, series in (("raw", capped), ("smooth", line)):
        points = frame.points(downsample(series, MAX_POINTS))
        parts.append(f'<polyline class="{name}" points="{points}"/>')
    for step, loss in line[-1:]:
        x, y = frame.x(step), frame.y(loss)
        parts.append(f'<circle class="end" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
    skipped = [row["step"] for row in merged.rows if is_skipped(row)]
    for x in sorted({round(frame.x(step)) for step in skipped}):
        parts.append(f'<path class="skipped" d="M{x - 4},{_BOTTOM} h8 l-4,-8 z"/>')
    legend = _legend(has_restarts=len(first_steps(rows)) > 1, has_skipped=bool(skipped))
    return _FIGURE.format(width=_WIDTH, height=_HEIGHT, body="\n".join(parts), legend=legend)


def _baseline(frame: _Frame, loss: float) -> list[str]:
    y = frame.y(loss)
    return [
        f'<line class="baseline" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
        f'<text x="{_RIGHT - 4}" y="{y - 6:.1f}" text-anchor="end">ln(vocab) = {loss:.3f}</text>',
    ]


def _axes(frame: _Frame) -> list[str]:
    parts = []
    ticks = nice_ticks(frame.y_low, frame.y_high, num_ticks=6)
    for tick in ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        label = tick_label(tick, ticks)
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    ticks = nice_ticks(frame.x_low, frame.x_high, num_ticks=8, whole=True)
    for tick in ticks:
        x, label = frame.x(tick), tick_label(tick, ticks)
        parts.append(f'<text x="{x:.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{label}</text>')
    middle_x, middle_y = (_LEFT + _RIGHT) / 2, (_TOP + _BOTTOM) / 2
    parts += [
        f'<line class="axis" x1="{_LEFT}" x2="{_RIGHT}" y1="{_BOTTOM}" y2="{_BOTTOM}"/>',
        f'<text x="{middle_x}" y="{_BOTTOM + 38}" text-anchor="middle">step</text>',
        f'<text transform="translate(14,{middle_y}) rotate(-90)" text-anchor="middle">loss</text>',
    ]
    return parts


def first_steps(rows: Sequence[Row]) -> dict[int, int]:
    """Return {attempt: its first step}, attempts sorted."""
    first: dict[int, int] = {}
    for row in rows:
        attempt, step = row["attempt"], row["step"]
        first[attempt] = min(step, first.get(attempt, step))
    return dict(sorted(first.items()))


def _restarts(frame: _Frame, rows: Sequence[Row]) -> list[str]:
    parts: list[str] = []
    labelled_x = -math.inf
    starts = [(frame.x(step), attempt) for attempt, step in first_steps(rows).items()][1:]
    for x, attempt in sorted(starts):
        parts.append(
            f'<line class="restart" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_BOTTOM}"/>'
        )
        at = min(max(x, _LEFT + _LABEL_SPACING / 2), _RIGHT - _LABEL_SPACING / 2)
        if at - labelled_x >= _LABEL_SPACING:
            labelled_x = at
            parts.append(
                f'<text class="restart-label" x="{at:.1f}" y="{_TOP - 8}" text-anchor="middle">'
                f"attempt {attempt}</text>"
            )
    return parts


def _legend(*, has_restarts: bool, has_skipped: bool) -> str:
    entries = [("raw", "each step"), ("smooth", "smoothed")]
    if has_restarts:
        entries.append(("restart", "restart"))
    if has_skipped:
        entries.append(("skipped", "step skipped, not finite"))
    return "".join(f'<span><i class="{name}"></i>{text}</span>' for name, text in entries)


_FIGURE = """<figure>
<svg viewBox="0 0 {width} {height}" role="img" aria-label="loss over steps">
{body}
</svg>
<figcaption>{legend}</figcaption>
</figure>"""
