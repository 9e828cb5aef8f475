# SPDX-License-Identifier: Apache-2.0
"""Standard output that may lose its reader without costing the run."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO


class OutlivingStream:
    """A text stream whose writes go nowhere once the other end is gone or full.

    `job | head`, a closed pager, a dropped ssh: the run goes on, its metrics and log are files.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or let go of the reader."""
        try:
            return self._stream.write(text)
        except OSError:
            self._let_go()
            return len(text)

    def flush(self) -> None:
        """Flush, or let go of the reader."""
        try:
            self._stream.flush()
        except OSError:
            self._let_go()

    def _let_go(self) -> None:
        # What is still buffered would fail again when the interpreter ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_readers() -> None:
    """Put both standard streams behind ``OutlivingStream``."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, OutlivingStream):
            setattr(sys, name, OutlivingStream(stream))
