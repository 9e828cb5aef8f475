# SPDX-License-Identifier: Apache-2.0
"""The curve's page, read back with the standard library's HTML parser."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

import pytest

from raydist.metrics.curve import render_curve

VOID = {"meta"}


class Page(HTMLParser):
    """Elements by name with their attributes, the text, and whether every tag is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def of_class(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for tag, attrs in self.elements if attrs.get("class") == name and tag != "i"]

    def points(self, name: str) -> list[tuple[float, float]]:
        (line,) = self.of_class(name)
        pairs = (line["points"] or "").split()
        return [(float(x), float(y)) for x, y in (pair.split(",") for pair in pairs)]

    def cell(self, name: str) -> str:
        found = re.search(rf"^{re.escape(name)}(.*)$", self.text, re.MULTILINE)
        assert found, name
        return found[1]


def _render(
    rows: Sequence[dict[str, Any]],
    *,
    title: str = "run",
    baseline_loss: float | None = math.log(257),
) -> Page:
    html = render_curve(rows, title=title, baseline_loss=baseline_loss)
    page = Page(html)
    assert page.open == []
    assert "nan" not in html
    assert not re.search(r"<script|https?:|src=", html)
    return page


def _row(step: int, *, attempt: int = 1, **values: object) -> dict[str, Any]:
    loss = 2.0 + 3.5 / (1 + step / 20)
    row = {"attempt": attempt, "step": step, "loss": loss, "tokens": 1024, "tokens_per_s": 5000.0}
    return row | values


def test_no_rows_say_so() -> None:
    page = _render([])
    assert "No steps have been recorded yet." in page.text
    assert page.cell("steps") == "0"
    assert "final loss" not in page.text


def test_one_row_is_one_point() -> None:
    page = _render([_row(1)])
    assert len(page.points("raw")) == len(page.points("smooth")) == 1
    assert len(page.of_class("end")) == 1


def test_each_step_is_a_point_inside_the_plot() -> None:
    page = _render([_row(step) for step in range(1, 301)])
    assert len(page.points("raw")) == len(page.points("smooth")) == 300
    assert all(60 <= x <= 930 and 30 <= y <= 375 for x, y in page.points("raw"))
    assert page.cell("final loss") == f"{_row(300)['loss']:.4f} at step 300"
    assert page.cell("best loss") == f"{_row(300)['loss']:.4f} at step 300"
    assert page.cell("tokens seen") == "307k"
    assert page.cell("median tokens/s") == "5.00k"


def test_a_long_run_has_2000_points_at_most() -> None:
    page = _render([_row(step) for step in range(1, 20_001)])
    assert len(page.points("raw")) == 2000
    assert len(page.points("smooth")) <= 2000


def test_the_baseline_is_drawn_only_where_there_is_one() -> None:
    rows = [_row(1), _row(2)]
    assert "ln(vocab) = 5.549" in _render(rows).text
    assert len(_render(rows).of_class("baseline")) == 1
    assert _render(rows, baseline_loss=None).of_class("baseline") == []


def test_a_restart_is_marked_where_the_new_attempt_began() -> None:
    rows = [_row(step) for step in range(1, 8)]
    rows += [_row(step, attempt=2) for step in range(6, 11)]
    page = _render(rows)
    assert len(page.points("raw")) == 10
    (line,) = page.of_class("restart")
    assert float(line["x1"] or "nan") == pytest.approx(page.points("raw")[5][0])
    assert "attempt 2" in page.text
    assert page.cell("attempts") == "2"
    assert page.cell("repeated steps") == "2 (6-7)"


def test_labels_of_close_restarts_do_not_overlap() -> None:
    rows = [_row(step, attempt=1 + step // 2) for step in range(200)]
    page = _render(rows)
    assert len(page.of_class("restart")) == 99
    at = [float(attrs["x"] or "nan") for attrs in page.of_class("restart-label")]
    assert all(b - a >= 72 for a, b in itertools.pairwise(at))


def test_skipped_steps_are_marked_and_no_points() -> None:
    rows = [_row(step) for step in range(1, 21)]
    for step in (4, 5, 9):
        rows[step - 1] |= {"loss": None, "loss_nonfinite": "inf"}
    page = _render(rows)
    assert len(page.points("raw")) == 17
    assert len(page.of_class("skipped")) == 3
    assert page.cell("skipped steps") == "3 (4-5, 9)"


def test_a_run_of_skipped_steps_only_is_drawn_without_a_line() -> None:
    page = _render([_row(1, loss=None, loss_nonfinite="nan")], baseline_loss=None)
    assert page.points("raw") == []
    assert len(page.of_class("skipped")) == 1


def test_a_spike_does_not_flatten_the_rest() -> None:
    rows = [_row(step) for step in range(1, 301)]
    rows[150]["loss"] = 1e30
    ys = [y for _, y in _render(rows).points("raw")]
    assert min(ys) >= 30
    assert max(ys) - sorted(ys)[1] > 100


def test_tokens_seen_are_taken_from_the_rows_where_they_say_so() -> None:
    rows = [_row(step, tokens_seen=step * 1_000_000) for step in range(1, 4)]
    assert _render(rows).cell("tokens seen") == "3.00M"


def test_rows_with_nothing_but_their_key_are_drawn() -> None:
    page = _render([{"attempt": 1, "step": 1}, {"attempt": 1, "step": 2}])
    assert page.cell("median tokens/s") == "-"
    assert page.cell("tokens seen") == "-"


def test_a_title_is_text_whatever_it_holds() -> None:
    page = _render([_row(1)], title="<b>&{style} {0} 'x'")
    assert "<b>&{style} {0} 'x'" in page.text
    assert "b" not in {tag for tag, _ in page.elements}
