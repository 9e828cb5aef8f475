# SPDX-License-Identifier: Apache-2.0
"""Bodies of S3 requests and replies without copies: sent out of a view, received into one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import IncompleteReadError, ReadTimeoutError

MIB = 1 << 20
_CHUNK_BYTES = MIB
"""Moved by one call of the socket: smaller ones cost CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """How long one attempt at a request may take, in seconds."""

    connect_s: float = 5.0
    """To connect, and for each mebibyte that is sent."""
    silence_s: float = 30.0
    """For the reply to begin, and between any two pieces of it."""
    slowest_bytes_per_s: int = MIB // 8
    """A reply slower than this on the whole, beside ``silence_s``, is given up."""

    def reply_s(self, num_bytes: int) -> float:
        """Return how long a reply of ``num_bytes`` may take from its head to its end."""
        return self.silence_s + num_bytes / self.slowest_bytes_per_s


class BodyView:
    """A request's body, read by botocore as a file but handed out as views of the memory itself.

    botocore takes no memoryview, and copies what it is given as bytes 16 KiB at a time: 4 to 10
    times the CPU (docs/benchmarks.md). ``read`` returns 1 MiB whatever smaller number is asked
    for: its reader only hands it on to the socket.

    Args:
        view: The bytes, unchanged until the request ends.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def __len__(self) -> int:
        return self._view.nbytes

    def read(self, count: int | None = None) -> memoryview:
        """Return the next bytes, at least ``count`` unless they end before; all when None."""
        wanted = self._view.nbytes if count is None or count < 0 else max(count, _CHUNK_BYTES)
        piece = self._view[self._at : self._at + wanted]
        self._at += piece.nbytes
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to ``offset`` from the start, from here or from the end."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._view.nbytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._at


def receive(
    body: Any, into: memoryview, limits: RequestLimits, monotonic_s: Callable[[], float]
) -> None:
    """Fill ``into`` from the body of a get_object reply, and close the body.

    Args:
        body: botocore's StreamingBody.
        into: As large as the body.
        limits: How long it may take.
        monotonic_s: Time.

    Raises:
        botocore.exceptions.IncompleteReadError: The body ended before.
        botocore.exceptions.ReadTimeoutError: It trickles.
        urllib3.exceptions.HTTPError: The connection broke.
    """
    due_s = monotonic_s() + limits.reply_s(into.nbytes)
    at = 0
    with body as stream:  # urllib3's own: read1 returns what has come, so that time is looked at
        while at < into.nbytes:
            piece = stream.read1(min(into.nbytes - at, _CHUNK_BYTES))
            if not piece:
                raise IncompleteReadError(actual_bytes=at, expected_bytes=into.nbytes)
            into[at : at + len(piece)] = piece
            at += len(piece)
            if at < into.nbytes and monotonic_s() > due_s:
                raise ReadTimeoutError(endpoint_url="a reply that trickles")
