# SPDX-License-Identifier: Apache-2.0
"""One line about where a run stands, for a terminal and for a log file."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TextIO

from raydist.clock import Clock

TERMINAL_REFRESH_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressEvent:
    """Where a run stands after an optimizer step."""

    step: int
    """Optimizer steps done."""
    num_steps: int
    """Optimizer steps in all."""
    loss: float
    """Loss of the step; may be non-finite."""
    learning_rate: float
    """Learning rate of the step."""
    tokens_per_s: float
    """Tokens trained per second by all ranks together."""
    step_time_s: float
    """Time of one optimizer step."""
    eta_s: float | None
    """Time to the last step, or None while there is nothing to tell it from."""
    skipped_steps: int
    """Steps skipped so far for a non-finite loss or gradient."""
    attempt: int
    """Life of the worker group, from 1."""

    def to_json_dict(self) -> dict[str, Any]:
        """Return the event in JSON types; a non-finite float is its name ("nan")."""
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_json_dict(cls, values: Mapping[str, Any]) -> ProgressEvent:
        """Rebuild an event; fields it does not know are left out.

        Raises:
            KeyError: A field is missing.
        """
        known: dict[str, Any] = {f.name: values[f.name] for f in fields(cls)}
        for name, value in known.items():
            if isinstance(value, str):
                known[name] = float(value)
        return cls(**known)


def format_progress(event: ProgressEvent) -> str:
    """Return the event as one line, without a newline."""
    parts = [
        f"step {event.step:>5}/{event.num_steps}",
        f"loss {event.loss:.3f}",
        f"lr {event.learning_rate:.1e}",
        f"{format_count(event.tokens_per_s)} tok/s",
        _format_step_time(event.step_time_s),
        f"eta {_format_duration(event.eta_s)}",
    ]
    if event.skipped_steps:
        parts.append(f"skipped {event.skipped_steps}")
    if event.attempt > 1:
        parts.append(f"attempt {event.attempt}")
    return "  ".join(parts)


def format_count(value: float) -> str:
    """Return a count in three or four digits: 812, 12.3k, 4.56M, 1.20B."""
    if not math.isfinite(value):
        return str(value)
    if round(value) < 1000:
        return f"{value:.0f}"
    for unit in ("k", "M", "B", "T"):
        value /= 1000
        if value < 999.5 or unit == "T":
            break
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}{unit}"


def _format_step_time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms/step" if seconds < 10 else f"{seconds:.1f} s/step"


def _format_duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


class ProgressPrinter:
    """Shows events: one line that is rewritten on a terminal, spaced lines in a log.

    Every other text for the same stream goes through ``message``, so that it never lands in the
    middle of the live line. Safe to call from several threads.
    """

    def __init__(self, stream: TextIO, *, is_terminal: bool, every_s: float, clock: Clock) -> None:
        """Show nothing yet.

        Args:
            stream: Where to write.
            is_terminal: Whether the stream is a terminal a person looks at.
            every_s: Time between lines in a log; a terminal is refreshed every second at least.
            clock: Tells when the next line is due.
        """
        self._stream = stream
        self._is_terminal = is_terminal
        self._every_s = min(every_s, TERMINAL_REFRESH_S) if is_terminal else every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._due_s = -math.inf
        self._live = ""  # what stands on the terminal's last line
        self._held: ProgressEvent | None = None  # the newest event, while it is not shown

    def show(self, event: ProgressEvent) -> None:
        """Show the event if a line is due, or if it is the first or the last step."""
        with self._lock:
            is_last = event.step >= event.num_steps
            self._held = event
            if is_last or self._clock.monotonic_s() >= self._due_s:
                self._print_held()
            if is_last:
                self._end_live()
            self._stream.flush()

    def message(self, text: str) -> None:
        """Print other text on lines of its own; a live line moves below it."""
        with self._lock:
            live = self._live
            self._draw("")
            self._stream.write(("\r" if live else "") + text + "\n")
            if live:
                self._draw(live)
            self._stream.flush()

    def close(self) -> None:
        """Show the newest event if it has not been, and leave the live line for good."""
        with self._lock:
            self._print_held()
            self._end_live()
            self._stream.flush()

    def _print_held(self) -> None:
        if self._held is None:
            return
        line = format_progress(self._held)
        self._held = None
        self._due_s = self._clock.monotonic_s() + self._every_s
        if self._is_terminal:
            self._draw(line)
        else:
            self._stream.write(line + "\n")

    def _draw(self, line: str) -> None:
        """Put ``line`` in the place of the live line; one that wraps could not be rewritten."""
        line = line[: shutil.get_terminal_size().columns - 1]
        if line or self._live:
            self._stream.write("\r" + line.ljust(len(self._live)))
        self._live = line

    def _end_live(self) -> None:
        if self._live:
            self._stream.write("\n")
            self._live = ""
