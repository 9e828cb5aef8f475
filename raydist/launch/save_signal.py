# SPDX-License-Identifier: Apache-2.0
"""SIGUSR1 to the driver asks its run for a save, as `raydist ckpt save` does."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from raydist.checkpoint.requests import request_save
from raydist.clock import SystemClock
from raydist.errors import StorageError
from raydist.storage import ObjectStore


@contextmanager
def saves_on_signal(store: ObjectStore) -> Iterator[None]:
    """Ask the run at ``store`` for a save at each SIGUSR1 while this lasts."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Signals are the main thread's.
        return

    def ask() -> None:
        try:
            request_save(store, clock=SystemClock())
        except StorageError as error:
            print(f"no save on SIGUSR1: {error}", file=sys.stderr, flush=True)

    def hear(number: int, frame: FrameType | None) -> None:
        # The interrupted code may hold any lock; the storage is asked from elsewhere.
        threading.Thread(target=ask, name="raydist-save-signal", daemon=True).start()

    previous = signal.signal(signal.SIGUSR1, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, previous)
