# SPDX-License-Identifier: Apache-2.0
"""Reading one S3 object in ranges, all of them out of the same version."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import IncompleteReadError

from raydist.storage.s3_transfer import MIB, MIN_PART_BYTES, run_all, spans

FIRST_READ_BYTES = 32 * MIB
"""Read in one request; what lies beyond comes in parallel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Part of an object, and the object it is a part of."""

    data: bytes
    object_bytes: int
    etag: str


NOTHING = Piece(data=b"", object_bytes=0, etag="")
"""For a start at or past the end, where the server gives no size."""


class ChangedWhileReadError(Exception):
    """Two pieces of one read came from two versions of the object."""


def range_header(start: int, length: int) -> str:
    """Return the HTTP range of ``length`` bytes (at least 1) from ``start``."""
    return f"bytes={start}-{start + length - 1}"


def take_piece(reply: dict[str, Any], start: int, length: int) -> Piece:
    """Read the body of a get_object reply whole.

    Raises:
        botocore.exceptions.IncompleteReadError: The body is shorter than announced.
        botocore.exceptions.BotoCoreError: The connection broke.
    """
    with closing(reply["Body"]) as body:
        data = body.read()
    if len(data) != reply["ContentLength"]:
        raise IncompleteReadError(actual_bytes=len(data), expected_bytes=reply["ContentLength"])
    etag = reply.get("ETag", "")
    total = reply.get("ContentRange", "").rpartition("/")[2]
    if total.isdigit():
        return Piece(data=data, object_bytes=int(total), etag=etag)
    # No Content-Range: the server sent the whole object, which HTTP allows.
    return Piece(data=data[start : start + length], object_bytes=len(data), etag=etag)


def read_object(
    read_piece: Callable[[int, int], Piece], pool: Executor, start: int, length: int | None
) -> bytes:
    """Return ``length`` (all when None) bytes from ``start``; short past the end.

    Args:
        read_piece: ``read_piece(start, length)``, with retries.
        pool: Where the ranges after the first are read.
        start: First byte.
        length: Bytes, or None for the rest.

    Raises:
        ChangedWhileReadError: The object was overwritten meanwhile.
        StorageError: A request failed for good.
    """
    first = read_piece(start, FIRST_READ_BYTES if length is None else min(length, FIRST_READ_BYTES))
    wanted = max(0, first.object_bytes - start)
    if length is not None:
        wanted = min(wanted, length)
    if len(first.data) == wanted:
        return first.data
    # CPython hands out a BytesIO's own bytes from getvalue(), so the object is held once.
    buffer = io.BytesIO(bytes(wanted))
    with buffer.getbuffer() as view:
        view[: len(first.data)] = first.data

        def fill(begin: int, end: int) -> None:
            piece = read_piece(start + begin, end - begin)
            if piece.etag != first.etag or len(piece.data) != end - begin:
                raise ChangedWhileReadError
            view[begin:end] = piece.data

        cuts = spans(len(first.data), wanted, MIN_PART_BYTES)
        run_all(pool, [lambda cut=cut: fill(*cut) for cut in cuts])
    return buffer.getvalue()
