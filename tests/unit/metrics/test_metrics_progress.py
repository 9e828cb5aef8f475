# SPDX-License-Identifier: Apache-2.0
"""The progress line and when it is printed; the clock is fake, the stream a string."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import pytest

from raydist.metrics.progress import (
    ProgressEvent,
    ProgressPrinter,
    format_count,
    format_progress,
)
from raydist.testing.fake_clock import FakeClock

EVENT = ProgressEvent(
    step=120,
    num_steps=300,
    loss=2.3184,
    learning_rate=8.7e-4,
    tokens_per_s=12_345.0,
    step_time_s=0.2141,
    eta_s=41.2,
    skipped_steps=0,
    attempt=1,
)


def _at(step: int) -> ProgressEvent:
    return replace(EVENT, step=step)


def _shown_steps(text: str) -> list[int]:
    return [int(line.split("/")[0].removeprefix("step ")) for line in text.splitlines()]


def test_the_line_of_a_usual_step() -> None:
    assert format_progress(EVENT) == (
        "step   120/300  loss 2.318  lr 8.7e-04  12.3k tok/s  214 ms/step  eta 0:41"
    )


def test_the_line_of_an_unusual_step() -> None:
    event = replace(
        EVENT,
        loss=math.nan,
        tokens_per_s=812.0,
        step_time_s=75.25,
        eta_s=2 * 86_400 + 3 * 3600 + 62.0,
        skipped_steps=2,
        attempt=3,
    )
    assert format_progress(event) == (
        "step   120/300  loss nan  lr 8.7e-04  812 tok/s  75.2 s/step  eta 2d 03:01:02"
        "  skipped 2  attempt 3"
    )


@pytest.mark.parametrize(
    ("eta_s", "text"),
    [(None, "-"), (math.inf, "-"), (0.0, "0:00"), (59.6, "1:00"), (3661.0, "1:01:01")],
)
def test_the_time_left(eta_s: float | None, text: str) -> None:
    assert format_progress(replace(EVENT, eta_s=eta_s)).endswith(f"eta {text}")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (999.4, "999"),
        (999.6, "1.00k"),
        (1234.0, "1.23k"),
        (99_949.0, "99.9k"),
        (99_951.0, "100k"),
        (999_600.0, "1.00M"),
        (4.56e9, "4.56B"),
        (1.5e12, "1.50T"),
        (2.5e15, "2500T"),
        (math.nan, "nan"),
    ],
)
def test_counts_have_three_digits_or_four(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize("loss", [2.5, math.inf])
def test_an_event_survives_json(loss: float) -> None:
    event = replace(EVENT, loss=loss, eta_s=None)
    text = json.dumps(event.to_json_dict() | {"of_a_later_version": 1}, allow_nan=False)
    assert ProgressEvent.from_json_dict(json.loads(text)) == event


def test_an_event_without_a_field_is_refused() -> None:
    with pytest.raises(KeyError, match="loss"):
        ProgressEvent.from_json_dict({"step": 1, "num_steps": 2})


def test_a_log_gets_the_first_the_last_and_spaced_lines_between() -> None:
    stream, clock = io.StringIO(), FakeClock()
    printer = ProgressPrinter(stream, is_terminal=False, every_s=5.0, clock=clock)
    for step in range(1, 13):
        printer.show(replace(_at(step), num_steps=12))
        clock.sleep(1.0)
    printer.close()
    assert _shown_steps(stream.getvalue()) == [1, 6, 11, 12]
    assert "\r" not in stream.getvalue()


def test_closing_early_shows_the_newest_step() -> None:
    stream = io.StringIO()
    printer = ProgressPrinter(stream, is_terminal=False, every_s=5.0, clock=FakeClock())
    for step in range(1, 5):
        printer.show(_at(step))
    printer.close()
    printer.close()
    assert _shown_steps(stream.getvalue()) == [1, 4]


def test_a_log_gets_messages_as_they_are() -> None:
    stream = io.StringIO()
    printer = ProgressPrinter(stream, is_terminal=False, every_s=5.0, clock=FakeClock())
    printer.message("saved step 5")
    printer.close()
    assert stream.getvalue() == "saved step 5\n"


class Screen:
    """What a terminal shows of a text: a carriage return starts writing over the line."""

    def __init__(self, text: str) -> None:
        self.lines = [""]
        column = 0
        for char in text:
            if char == "\n":
                self.lines.append("")
                column = 0
            elif char == "\r":
                column = 0
            else:
                line = self.lines[-1]
                self.lines[-1] = line[:column] + char + line[column + 1 :]
                column += 1
        self.lines = [line.rstrip() for line in self.lines]


@pytest.fixture
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


@pytest.mark.usefixtures("_wide_terminal")
def test_a_terminal_has_one_line_rewritten_each_second() -> None:
    stream, clock = io.StringIO(), FakeClock()
    printer = ProgressPrinter(stream, is_terminal=True, every_s=5.0, clock=clock)
    long = replace(_at(1), skipped_steps=1000)
    printer.show(long)
    clock.sleep(0.5)
    printer.show(_at(2))
    assert Screen(stream.getvalue()).lines == [format_progress(long)]
    clock.sleep(0.5)
    printer.show(_at(3))
    assert Screen(stream.getvalue()).lines == [format_progress(_at(3))]
    printer.show(_at(300))
    printer.close()
    assert Screen(stream.getvalue()).lines == [format_progress(_at(300)), ""]


@pytest.mark.usefixtures("_wide_terminal")
def test_a_message_stands_above_the_live_line() -> None:
    stream = io.StringIO()
    printer = ProgressPrinter(stream, is_terminal=True, every_s=5.0, clock=FakeClock())
    printer.message("starting")
    printer.show(_at(1))
    printer.message("saved")
    assert Screen(stream.getvalue()).lines == ["starting", "saved", format_progress(_at(1))]
    printer.close()
    printer.message("done")
    assert Screen(stream.getvalue()).lines[-3:] == [format_progress(_at(1)), "done", ""]


def test_a_live_line_does_not_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = io.StringIO()
    printer = ProgressPrinter(stream, is_terminal=True, every_s=5.0, clock=FakeClock())
    printer.show(_at(1))
    assert Screen(stream.getvalue()).lines == [format_progress(_at(1))[:39].rstrip()]
