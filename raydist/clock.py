# SPDX-License-Identifier: Apache-2.0
"""Time as an argument, so that everything that waits can be tested without waiting."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What raydist asks of time."""

    def now_unix_s(self) -> float:
        """Seconds since the Unix epoch; for records, never for intervals."""
        ...

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary start that never goes back; for intervals."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait ``seconds``."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now_unix_s(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary start."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait ``seconds``."""
        time.sleep(seconds)
