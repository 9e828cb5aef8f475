# SPDX-License-Identifier: Apache-2.0
"""Reading one S3 object in ranges, all of them out of the same version."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import IncompleteReadError

from raydist.storage.s3_transfer import MIB, MIN_PART_BYTES, run_all, spans

FIRST_READ_BYTES = 32 * MIB
"""Read in one request; what lies beyond comes in parallel."""


Fill = Callable[[Any, memoryview], None]
"""``s3_body.receive`` under the store's limits: fills a view from the body of a reply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Part of an object, and the object it is a part of."""

    data: bytes | memoryview
    """The bytes; a view of the destination where one was given."""
    object_bytes: int
    etag: str


NOTHING = Piece(data=b"", object_bytes=0, etag="")
"""For a start at or past the end, where the server gives no size."""


class ChangedWhileReadError(Exception):
    """Two pieces of one read came from two versions of the object."""


def range_header(start: int, length: int) -> str:
    """Return the HTTP range of ``length`` bytes (at least 1) from ``start``."""
    return f"bytes={start}-{start + length - 1}"


def take_piece(
    reply: dict[str, Any],
    start: int,
    length: int,
    into: memoryview | None,
    fill: Fill,
) -> Piece:
    """Read the body of a get_object reply whole.

    Args:
        reply: botocore's.
        start: First byte that was asked for.
        length: Bytes that were asked for.
        into: Where they go; None: into memory of their own.
        fill: Receives a body whole.

    Raises:
        botocore.exceptions.IncompleteReadError: The body is not what was announced or asked for.
        botocore.exceptions.BotoCoreError: The connection broke, or the body trickles.
        urllib3.exceptions.HTTPError: The connection broke.
    """
    announced, etag = reply["ContentLength"], reply.get("ETag", "")
    span, _, total = reply.get("ContentRange", "").rpartition("/")
    if not total.isdigit():
        # No Content-Range: the server sent the whole object, which HTTP allows.
        whole = _received(reply["Body"], announced, fill)
        data = whole[start : start + length]
        if into is not None:
            into[: len(data)] = data
            data = into[: len(data)]
        return Piece(data=data, object_bytes=len(whole), etag=etag)
    if announced > length or not span.startswith(f"bytes {start}-"):
        reply["Body"].close()
        raise IncompleteReadError(actual_bytes=announced, expected_bytes=length)
    if into is None:
        data = _received(reply["Body"], announced, fill)
    else:
        data = into[:announced]
        fill(reply["Body"], data)
    return Piece(data=data, object_bytes=int(total), etag=etag)


def _received(body: Any, num_bytes: int, fill: Fill) -> bytes:
    # CPython hands out a BytesIO's own bytes from getvalue(), so they are held once.
    buffer = io.BytesIO(bytes(num_bytes))
    with buffer.getbuffer() as view:
        fill(body, view)
    return buffer.getvalue()


ReadPiece = Callable[[int, int, "memoryview | None"], Piece]
"""``read_piece(start, length, into)``, with retries."""


def read_object(read_piece: ReadPiece, pool: Executor, start: int, length: int | None) -> bytes:
    """Return ``length`` (all when None) bytes from ``start``; short past the end.

    Args:
        read_piece: Reads one range.
        pool: Where the ranges after the first are read.
        start: First byte.
        length: Bytes, or None for the rest.

    Raises:
        ChangedWhileReadError: The object was overwritten meanwhile.
        StorageError: A request failed for good.
    """
    count = FIRST_READ_BYTES if length is None else min(length, FIRST_READ_BYTES)
    first = read_piece(start, count, None)
    wanted = max(0, first.object_bytes - start)
    if length is not None:
        wanted = min(wanted, length)
    if len(first.data) == wanted:
        return bytes(first.data)
    buffer = io.BytesIO(bytes(wanted))
    with buffer.getbuffer() as view:
        view[: len(first.data)] = first.data
        _read_rest(read_piece, pool, start, first, view)
    return buffer.getvalue()


def read_object_into(read_piece: ReadPiece, pool: Executor, start: int, into: memoryview) -> int:
    """Read from ``start`` into ``into``; returns the bytes read, fewer past the end.

    Args:
        read_piece: Reads one range.
        pool: Where the ranges after the first are read.
        start: First byte.
        into: Where they go; as many as it holds.

    Raises:
        ChangedWhileReadError: The object was overwritten meanwhile.
        StorageError: A request failed for good.
    """
    count = min(into.nbytes, FIRST_READ_BYTES)
    first = read_piece(start, count, into[:count])
    wanted = min(into.nbytes, max(0, first.object_bytes - start))
    if len(first.data) < wanted:
        _read_rest(read_piece, pool, start, first, into[:wanted])
    return wanted


def _read_rest(
    read_piece: ReadPiece, pool: Executor, start: int, first: Piece, view: memoryview
) -> None:
    def fill(begin: int, end: int) -> None:
        piece = read_piece(start + begin, end - begin, view[begin:end])
        if piece.etag != first.etag or len(piece.data) != end - begin:
            raise ChangedWhileReadError

    cuts = spans(len(first.data), view.nbytes, MIN_PART_BYTES)
    run_all(pool, [lambda cut=cut: fill(*cut) for cut in cuts])
