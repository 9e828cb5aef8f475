# SPDX-License-Identifier: Apache-2.0
"""A clock that stands still until it is told to go on."""

from __future__ import annotations

import threading


class FakeClock:
    """Implements Clock: time passes only in ``sleep``, which returns at once. Thread-safe."""

    def __init__(self, *, start_unix_s: float = 1_700_000_000.0) -> None:
        """Stand at ``start_unix_s``, with nothing slept."""
        self._start_unix_s = start_unix_s
        self._elapsed_s = 0.0
        self._lock = threading.Lock()

    def now_unix_s(self) -> float:
        """Seconds since the Unix epoch."""
        return self._start_unix_s + self.monotonic_s()

    def monotonic_s(self) -> float:
        """Seconds slept so far."""
        with self._lock:
            return self._elapsed_s

    def sleep(self, seconds: float) -> None:
        """Move time on by ``seconds``."""
        with self._lock:
            self._elapsed_s += seconds
