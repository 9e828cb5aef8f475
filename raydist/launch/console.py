# SPDX-License-Identifier: Apache-2.0
"""The user's view: raydist's own lines and one progress line; all else goes to a file."""

from __future__ import annotations

import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from raydist.clock import SystemClock
from raydist.errors import StorageError
from raydist.launch.events import read_event
from raydist.metrics.progress import ProgressEvent, ProgressPrinter
from raydist.storage import ObjectStore

_NUM_REMEMBERED = 256


class Console:
    """Shows events; keeps the output of workers and of Ray in a file."""

    def __init__(self, *, progress_every_s: float, stream: TextIO | None = None) -> None:
        self._stream: TextIO = stream or sys.stdout
        is_terminal = self._stream.isatty()
        self._printer = ProgressPrinter(
            self._stream, is_terminal=is_terminal, every_s=progress_every_s, clock=SystemClock()
        )
        handle, path = tempfile.mkstemp(prefix="raydist-", suffix=".log")
        self.log_path = Path(path)
        self._seen: deque[str] = deque(maxlen=_NUM_REMEMBERED)
        self._give_back: Callable[[], None] = lambda: None
        self._log = open(handle, "w", encoding="utf-8", errors="replace")

    def say(self, text: str) -> None:
        """Show one line."""
        self._printer.message(text)
        self._stream.flush()

    def show(self, event: ProgressEvent) -> None:
        """Show progress when a line is due."""
        self._printer.show(event)

    def take_over_worker_output(self) -> None:
        """Route what Ray forwards from workers here instead of to the terminal."""
        from ray._private import worker
        from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

        print_as_ray_does = worker.print_to_stdstream

        def give_back() -> None:
            dispatcher.remove_handler("raydist")
            worker.print_to_stdstream = print_as_ray_does

        dispatcher.remove_handler("ray_print_logs")
        dispatcher.add_handler("raydist", self._take)
        # What Ray itself has to say of a worker that died comes past the dispatcher.
        worker.print_to_stdstream = lambda data, ignore_prefix: self._take(data)
        self._give_back = give_back

    def close(self, store: ObjectStore | None, key: str) -> str:
        """End the progress line and move the log to ``store``; without one the log goes.

        Returns:
            Where the log lies: the key, or a local path where the store could not take it.
        """
        self._give_back()
        self._printer.close()
        self._log.close()
        if store is not None:
            try:
                store.put(key, self.log_path.read_bytes())
            except StorageError:
                return str(self.log_path)
        self.log_path.unlink()
        return key

    def _take(self, data: dict[str, Any]) -> None:
        for line in data["lines"]:
            event = read_event(line)
            if event is None:
                self._log.write(f"{data.get('ip', '')} {data['pid']}: {line}\n")
                continue
            if event.serial in self._seen:
                continue
            self._seen.append(event.serial)
            if event.kind == "say":
                self.say(event.value)
            elif event.kind == "row":
                self.show(ProgressEvent.from_json_dict(event.value))
        self._log.flush()
