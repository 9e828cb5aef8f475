# SPDX-License-Identifier: Apache-2.0
"""What rank 0 tells the driver over its standard output. Faked: the clock."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from raydist.launch.events import RowReporter, read_event, write_event
from raydist.metrics.progress import ProgressEvent
from raydist.testing.configs import small_config
from raydist.testing.fake_clock import FakeClock

_EVENT = ProgressEvent(
    step=3, num_steps=10, loss=2.5, learning_rate=1e-3, tokens_per_s=64.0, step_time_s=0.5,
    eta_s=3.5, skipped_steps=0, attempt=1,
)  # fmt: skip


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    # As Ray's log monitor reads a file; str.splitlines would also cut at the mark's first byte.
    *lines, rest = capsys.readouterr().out.split("\n")
    assert not rest
    return lines


@pytest.mark.parametrize(
    "value", ["a line", "two\nlines", "", 'quote " slash \\ é \u2028', {"a": [1, None]}, 3.5]
)
def test_event_written_is_one_line_that_reads_back(
    value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write_event("say", value)
    (line,) = _lines(capsys)
    event = read_event(line)
    assert event is not None
    assert event[:2] == ("say", value)


def test_event_behind_a_prefix_of_the_forwarder_reads_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_event("say", "hello")
    (line,) = _lines(capsys)
    event = read_event(f"(RayTrainWorker pid=17, ip=10.0.0.1) {line}")
    assert event is not None
    assert event[:2] == ("say", "hello")


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 2.5])
def test_event_of_progress_keeps_its_loss(loss: float, capsys: pytest.CaptureFixture[str]) -> None:
    event = replace(_EVENT, loss=loss)
    write_event("row", event.to_json_dict())
    (line,) = _lines(capsys)
    found = read_event(line)
    assert found is not None
    assert found[0] == "row"
    assert str(ProgressEvent.from_json_dict(found[1])) == str(event)  # nan is unequal to itself


@pytest.mark.parametrize(
    "line",
    ["", "noise", "raydist [1, 2]", '["say", "x"]', "\x1e", "\x1eraydist", "step 3: loss nan"],
)
def test_noise_is_no_event(line: str) -> None:
    assert read_event(line) is None


def _row(step: int, **changes: Any) -> dict[str, Any]:
    row = {
        "step": step, "loss": 2.5, "learning_rate": 1e-3, "step_time_s": 0.5,
        "skipped_steps": 0, "attempt": 2,
    }  # fmt: skip
    return row | changes


class _Reported:
    def __init__(self, **changes: Any) -> None:
        self.events: list[ProgressEvent] = []
        self.clock = FakeClock()
        self.reporter = RowReporter(small_config(**changes), self.clock, self.events.append)

    @property
    def steps(self) -> list[int]:
        return [event.step for event in self.events]


def test_reporter_shows_the_first_the_last_and_at_most_two_rows_a_second() -> None:
    reported = _Reported(num_steps=21)
    for step in range(1, 22):
        reported.reporter(_row(step))
        reported.clock.sleep(0.125)
    assert reported.steps == [1, 5, 9, 13, 17, 21]
    reported = _Reported(num_steps=4)
    for step in range(1, 5):
        reported.reporter(_row(step))
    assert reported.steps == [1, 4]


def test_reporter_shows_every_row_of_slow_steps() -> None:
    reported = _Reported()
    for step in range(1, 11):
        reported.reporter(_row(step))
        reported.clock.sleep(0.5)
    assert reported.steps == list(range(1, 11))


def test_reporter_event_holds_the_rows_values_and_rates() -> None:
    reported = _Reported()
    reported.reporter(_row(4, skipped_steps=1, loss=math.nan))
    (event,) = reported.events
    assert math.isnan(event.loss)
    assert (event.step, event.num_steps, event.skipped_steps, event.attempt) == (4, 10, 1, 2)
    assert event.step_time_s == 0.5
    assert event.tokens_per_s == 8 * 4 / 0.5  # a global batch of 8 sequences of 4
    assert event.eta_s == 6 * 0.5


def test_reporter_forgets_a_slow_first_step() -> None:
    reported = _Reported(num_steps=200)
    for step in range(1, 101):
        reported.reporter(_row(step, step_time_s=60.0 if step == 1 else 0.5))
        reported.clock.sleep(0.5)
    assert reported.events[0].step_time_s == 60.0
    assert reported.events[-1].step_time_s == pytest.approx(0.5, rel=0.01)
