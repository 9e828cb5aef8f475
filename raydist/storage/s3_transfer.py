# SPDX-License-Identifier: Apache-2.0
"""Big S3 objects in pieces: how they are cut, and several pieces at a time."""

from __future__ import annotations

import base64
import concurrent.futures
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from awscrt import checksums

from raydist.errors import StorageError
from raydist.storage.s3_body import MIB

_log = logging.getLogger(__name__)

MIN_PART_BYTES = 16 * MIB
_MAX_NUM_PARTS = 9_000
"""Of the 10,000 that S3 allows."""


def part_size_bytes(object_bytes: int) -> int:
    """Return the size of all parts but the last: at least 16 MiB, at most 9,000 parts.

    A part is sent out of the object's own memory, so larger parts hold no more of it.

    Source: S3's limits, 10,000 parts of 5 MiB to 5 GiB; s3tools/s3cmd#613.
    """
    return max(MIN_PART_BYTES, -(-object_bytes // _MAX_NUM_PARTS))


def spans(start: int, end: int, step: int) -> list[tuple[int, int]]:
    """Cut [start, end) into consecutive (start, end) of ``step`` each, the last one shorter."""
    return [(at, min(at + step, end)) for at in range(start, end, step)]


class TransferThreads:
    """The thread pool of a store, made with the first big object and again after a fork."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._pid = 0

    def pool(self) -> concurrent.futures.Executor:
        """Return the pool of this process."""
        with self._lock:
            if self._pool is None or self._pid != os.getpid():
                self._pool = concurrent.futures.ThreadPoolExecutor(self._num_threads, "raydist-s3")
                self._pid = os.getpid()
            return self._pool


def run_all(pool: concurrent.futures.Executor, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run ``tasks`` on the pool; called on the caller's thread, never on one of the pool's.

    When this returns or raises, none of them runs any more: after a failure those that have not
    started are dropped and the others are waited for.

    Returns:
        Their results, in order.

    Raises:
        Exception: The first failed task's, in order of ``tasks``.
    """
    futures = [pool.submit(task) for task in tasks]
    try:
        concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
    finally:
        for future in futures:
            future.cancel()
        concurrent.futures.wait(futures)
    for future in futures:
        if not future.cancelled() and (error := future.exception()) is not None:
            raise error
    return [future.result() for future in futures]


def upload_parts(
    request: Callable[..., Any],
    pool: concurrent.futures.Executor,
    view: memoryview,
    complete: Callable[[str, list[dict[str, Any]]], None],
    *,
    has_checksums: bool,
) -> None:
    """Upload ``view`` as a multipart upload and complete it; abort it on any failure.

    Nothing of it is copied; as many parts are on the way as the pool has threads.

    Args:
        request: ``request(operation, **arguments)`` on this object, with retries.
        pool: Where the parts go up.
        view: The object, as bytes.
        complete: Called with the upload's id and its parts once all are there.
        has_checksums: Whether each part goes with its CRC32C, which the server checks.

    Raises:
        StorageError: A request failed for good.
    """
    algorithm = {"ChecksumAlgorithm": "CRC32C"} if has_checksums else {}
    upload_id: str = request("create_multipart_upload", **algorithm)["UploadId"]

    def upload(number: int, start: int, end: int) -> dict[str, Any]:
        body = view[start:end]
        sums = body_checksum(body) if has_checksums else {}
        reply = request("upload_part", UploadId=upload_id, PartNumber=number, Body=body, **sums)
        return {"PartNumber": number, "ETag": reply["ETag"], **sums}

    cuts = spans(0, view.nbytes, part_size_bytes(view.nbytes))
    try:
        parts = run_all(
            pool,
            [
                lambda number=number, cut=cut: upload(number, *cut)
                for number, cut in enumerate(cuts, start=1)
            ],
        )
        complete(upload_id, parts)
    except BaseException:  # an interrupt too: parts of an upload left open are paid for
        _abort(request, upload_id)
        raise


def body_checksum(body: memoryview) -> dict[str, str]:
    """Return the argument by which the server checks ``body``.

    Computed here in one pass: botocore would send the body in chunks to compute it on the way.
    """
    value = checksums.crc32c(body)  # pyright: ignore[reportArgumentType] # any buffer
    return {"ChecksumCRC32C": base64.b64encode(value.to_bytes(4, "big")).decode()}


def _abort(request: Callable[..., Any], upload_id: str) -> None:
    try:
        request("abort_multipart_upload", UploadId=upload_id)
    except StorageError as error:  # the failure that led here is the one to report
        _log.warning("storage: parts of upload %s stay behind: %s", upload_id, error)
