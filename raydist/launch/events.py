# SPDX-License-Identifier: Apache-2.0
"""What rank 0 tells the user, carried over the worker's standard output as marked lines.

Ray forwards every line that a worker prints to the driver. Marked lines are raydist's own and
are shown; everything else goes to a file. No actor and no port are needed for it.
"""

from __future__ import annotations

import itertools
import json
import secrets
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from raydist.clock import Clock
from raydist.config import RunConfig
from raydist.metrics.progress import ProgressEvent

_MARK = "::raydist:: "
_MIN_INTERVAL_S = 0.5
_PROCESS = secrets.token_hex(6)
_count = itertools.count()


class Event(NamedTuple):
    """One thing that a rank told.

    Fields:
        serial: Unique; where two Ray nodes on one host share a log folder, Ray forwards each line
            twice.
    """

    kind: str
    value: Any
    serial: str


def write_event(kind: str, value: Any) -> None:
    """Print one event on this process's standard output."""
    serial = f"{_PROCESS}-{next(_count)}"
    sys.stdout.write(f"{_MARK}{json.dumps([kind, value, serial])}\n")
    sys.stdout.flush()


def read_event(line: str) -> Event | None:
    """Return the event of a whole marked line, None for any other."""
    _, mark, payload = line.partition(_MARK)
    if not mark:
        return None
    try:
        kind, value, serial = json.loads(payload)
    except ValueError:
        return None  # cut or interleaved on its way: it goes to the log as it is
    return Event(kind, value, serial)


class RowReporter:
    """Turns metrics rows into progress events, a few a second at most."""

    def __init__(
        self, config: RunConfig, clock: Clock, emit: Callable[[ProgressEvent], None]
    ) -> None:
        self._config = config
        self._clock = clock
        self._emit = emit
        self._last_s: float | None = None
        self._step_time_s = 0.0

    def __call__(self, row: dict[str, Any]) -> None:
        """Take one row."""
        step, step_time_s = row["step"], row["step_time_s"]
        # A decaying mean over about ten steps; the first steps are slow and are forgotten.
        weight = 0.1 if self._step_time_s else 1.0
        self._step_time_s += weight * (step_time_s - self._step_time_s)
        now = self._clock.monotonic_s()
        is_due = self._last_s is None or now - self._last_s >= _MIN_INTERVAL_S
        if not is_due and step != self._config.num_steps:
            return
        self._last_s = now
        tokens = self._config.batch.global_batch_size * self._config.data.sequence_length
        self._emit(
            ProgressEvent(
                step=step,
                num_steps=self._config.num_steps,
                loss=row["loss"],
                learning_rate=row["learning_rate"],
                tokens_per_s=tokens / self._step_time_s,
                step_time_s=self._step_time_s,
                eta_s=(self._config.num_steps - step) * self._step_time_s,
                skipped_steps=row["skipped_steps"],
                attempt=row["attempt"],
            )
        )
