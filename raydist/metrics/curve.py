# SPDX-License-Identifier: Apache-2.0
"""The loss curve of a run as one HTML page that needs nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from raydist.metrics.history import MergedHistory, Row, merge
from raydist.metrics.plot import draw_curve, first_steps
from raydist.metrics.progress import format_count
from raydist.metrics.rows import is_number, is_skipped
from raydist.metrics.series import Point


def render_curve(rows: Sequence[Row], *, title: str, baseline_loss: float | None) -> str:
    """Return a page with the loss over steps and a table of what came of it.

    Args:
        rows: Rows of all attempts, as ``read_history`` gives them.
        title: Heading of the page; any text.
        baseline_loss: Loss of a model that knows nothing, ln(vocab_size); None draws no line.
    """
    merged = merge(rows)
    losses = [(float(r["step"]), float(r["loss"])) for r in merged.rows if is_number(r, "loss")]
    plot = draw_curve(rows, merged, losses, baseline_loss) if merged.rows else _EMPTY
    table = _table(rows, merged, losses)
    return _PAGE.format(title=escape(title), style=_STYLE, plot=plot, table=table)


def _table(rows: Sequence[Row], merged: MergedHistory, losses: list[Point]) -> str:
    speeds = [r["tokens_per_s"] for r in merged.rows if is_number(r, "tokens_per_s")]
    cells: list[tuple[str, str]] = [("steps", f"{len(merged.rows):,}")]
    if losses:
        last, best = losses[-1], min(losses, key=lambda point: point[1])
        cells += [
            ("final loss", f"{last[1]:.4f} at step {last[0]:,.0f}"),
            ("best loss", f"{best[1]:.4f} at step {best[0]:,.0f}"),
        ]
    cells += [
        ("tokens seen", _tokens_seen(merged.rows)),
        ("median tokens/s", format_count(statistics.median(speeds)) if speeds else "-"),
        ("attempts", f"{len(first_steps(rows)):,}"),
        ("repeated steps", _step_list(merged.repeated_steps)),
        ("skipped steps", _step_list([row["step"] for row in merged.rows if is_skipped(row)])),
    ]
    return "\n".join(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in cells)


def _tokens_seen(rows: Sequence[Row]) -> str:
    totals = [row["tokens_seen"] for row in rows if is_number(row, "tokens_seen")]
    steps = [row["tokens"] for row in rows if is_number(row, "tokens")]
    return format_count(max(totals) if totals else sum(steps)) if totals or steps else "-"


def _step_list(steps: Sequence[int]) -> str:
    if not steps:
        return "0"
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    texts = [f"{a}" if a == b else f"{a}-{b}" for a, b in spans]
    more = ", ..." if len(texts) > 6 else ""
    return f"{len(steps):,} ({', '.join(texts[:6])}{more})"


_EMPTY = '<p class="empty">No steps have been recorded yet.</p>'

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1d2530; --soft: #667080;
  --grid: #e6e9ee; --raw: #8fb4e2; --smooth: #1c5fb0; --restart: #c98a1b; --skipped: #cc3d33; }
@media (prefers-color-scheme: dark) { :root { --page: #14181e; --text: #e4e8ee; --soft: #98a2b0;
  --grid: #272e38; --raw: #41699a; --smooth: #7db4f5; --restart: #d9a441; --skipped: #f0736a; } }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.25rem; font-weight: 600; margin: 0 0 .75rem; overflow-wrap: anywhere; }
figure { margin: 0; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
polyline { fill: none; stroke-linejoin: round; }
polyline.raw { stroke: var(--raw); stroke-width: 1; }
polyline.smooth { stroke: var(--smooth); stroke-width: 2; }
circle.end { fill: var(--smooth); }
line.grid { stroke: var(--grid); }
line.axis { stroke: var(--soft); }
line.baseline { stroke: var(--soft); stroke-dasharray: 6 4; }
line.restart { stroke: var(--restart); opacity: .6; }
svg text.restart-label { fill: var(--restart); }
path.skipped { fill: var(--skipped); }
figcaption { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding-left: 3.75rem;
  color: var(--soft); font-size: 13px; }
figcaption i { display: inline-block; width: 1.25rem; height: 0; margin-right: .4rem;
  vertical-align: middle; border-top: 2px solid var(--smooth); }
figcaption i.raw { border-color: var(--raw); }
figcaption i.restart { width: 0; height: .9rem; border-top: 0;
  border-left: 1px solid var(--restart); }
figcaption i.skipped { width: 0; border: 4px solid transparent; border-top: 0;
  border-bottom: 8px solid var(--skipped); }
table { margin-top: 1.25rem; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem 1.5rem .2rem 0; text-align: left; border-bottom: 1px solid var(--grid); }
th { font-weight: 400; color: var(--soft); }
.empty { color: var(--soft); }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{plot}
<table>
{table}
</table>
</body>
</html>
"""
