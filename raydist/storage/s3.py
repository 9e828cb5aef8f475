# SPDX-License-Identifier: Apache-2.0
"""Objects in an S3 bucket, AWS's or any server's that speaks S3, through boto3."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, overload

from botocore.exceptions import ClientError

from raydist.clock import Clock, SystemClock
from raydist.errors import ObjectExistsError, ObjectMissingError, StorageError
from raydist.storage.keys import check_key, check_prefix, check_range
from raydist.storage.retry import RetryPolicy
from raydist.storage.s3_body import RequestLimits, receive
from raydist.storage.s3_client import S3Connection
from raydist.storage.s3_errors import REQUEST_ERRORS, failure_of
from raydist.storage.s3_read import (
    FIRST_READ_BYTES,
    NOTHING,
    ChangedWhileReadError,
    Piece,
    range_header,
    read_object,
    read_object_into,
    take_piece,
)
from raydist.storage.s3_requests import BucketRequests
from raydist.storage.s3_transfer import (
    MIB,
    TransferThreads,
    body_checksum,
    spans,
    upload_parts,
)
from raydist.storage.s3_uploads import abort_upload, stale_uploads
from raydist.storage.stale_uploads import StaleUpload

_MAX_READS = 3


class S3Store:
    """An ObjectStore on a bucket; the bucket is never created.

    A create-if-absent whose reply was lost is settled by reading the object back: it is ours if
    the bytes are, so creators that must tell each other apart write bytes that differ.

    Args:
        bucket: The bucket's name.
        prefix: Put before every key, with a ``/`` between.
        endpoint_url: An S3-like server; None takes AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, and
            without those AWS.
        policy: How long a request is tried again.
        limits: How long one attempt at it may take.
        clock: Time, for the waits between attempts.
        rng: Jitter; None seeds itself.
        multipart_from_bytes: Objects of this size and more go up in parts.
        num_threads: Parts and ranges on the way at a time, all callers together.

    Raises:
        ConfigError: The endpoint cannot be a URL of an HTTP server.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint_url: str | None = None,
        policy: RetryPolicy | None = None,
        limits: RequestLimits | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        multipart_from_bytes: int = 64 * MIB,
        num_threads: int = 4,
    ) -> None:
        self._multipart_from_bytes = multipart_from_bytes
        clock, limits = clock or SystemClock(), limits or RequestLimits()
        self._fill = partial(receive, limits=limits, monotonic_s=clock.monotonic_s)
        self._threads = TransferThreads(num_threads)
        self._requests = BucketRequests(
            bucket=bucket,
            prefix=prefix.strip("/"),
            # Callers' own threads make requests beside those of the pool.
            connection=S3Connection(
                endpoint_url=endpoint_url, limits=limits, num_connections=num_threads + 16
            ),
            policy=policy or RetryPolicy(),
            clock=clock,
            rng=rng or random.Random(),
        )

    def __repr__(self) -> str:
        return f"S3Store({self._requests.url('')!r}, {self._requests.place})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "An S3Store holds connections and cannot be sent to another process; send its URL "
            "and call open_store there."
        )

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        """Write one object whole; big ones in parallel parts that appear at once.

        Raises:
            ObjectExistsError: ``if_absent`` and the key is taken.
            StorageError: The store refused, or was out of reach for too long.
        """
        check_key(key)
        view = memoryview(data).cast("B")
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        is_checked = self._requests.is_aws  # other servers may refuse checksums (boto/boto3#4398)
        if view.nbytes < self._multipart_from_bytes:
            sums = body_checksum(view) if is_checked else {}
            self._write(key, view, "put_object", Body=view, **sums, **condition)
            return

        def complete(upload_id: str, parts: list[dict[str, Any]]) -> None:
            self._write(
                key,
                view,
                "complete_multipart_upload",
                UploadId=upload_id,
                MultipartUpload={"Parts": parts},
                **condition,
            )

        def request(operation: str, **arguments: Any) -> Any:
            attempt = partial(self._requests.on_object, operation, key, **arguments)
            return self._requests.retrying("write", key, attempt)

        upload_parts(request, self._threads.pool(), view, complete, has_checksums=is_checked)

    def _write(self, key: str, view: memoryview, operation: str, **arguments: Any) -> None:
        """Make the request that lets the object appear, and settle attempts with lost replies."""
        may_be_ours = False

        def attempt() -> None:
            nonlocal may_be_ours
            try:
                self._requests.on_object(operation, key, **arguments)
            except REQUEST_ERRORS as error:
                failure = failure_of(error)
                is_taken = "IfNoneMatch" in arguments and failure.http_status == 412
                is_consumed = failure.code == "NoSuchUpload"  # a completed upload is gone
                if may_be_ours and (is_taken or is_consumed) and self._holds(key, view):
                    return
                if is_taken:
                    raise ObjectExistsError(key=key) from error
                may_be_ours = may_be_ours or failure.may_have_happened
                raise

        self._requests.retrying("write", key, attempt)

    def _holds(self, key: str, view: memoryview) -> bool:
        """Whether the object's bytes are exactly these."""
        if self.size(key) != view.nbytes:
            return False
        try:
            return all(
                self.get(key, start=start, length=end - start) == view[start:end]
                for start, end in spans(0, view.nbytes, FIRST_READ_BYTES)
            )
        except ObjectMissingError:
            return False

    @overload
    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes: ...

    @overload
    def get(self, key: str, *, start: int = 0, into: memoryview) -> int: ...

    def get(
        self,
        key: str,
        *,
        start: int = 0,
        length: int | None = None,
        into: memoryview | None = None,
    ) -> bytes | int:
        """Return ``length`` bytes from ``start``, all of one version; short past the end.

        With ``into``: fill it, straight from the connection, and return the number of bytes.

        Raises:
            ObjectMissingError: No such object.
            StorageError: The store refused, was out of reach for too long, or the object was
                overwritten during each of several reads.
        """
        check_key(key)
        length = into.nbytes if into is not None else length
        check_range(start, length)
        if length == 0:
            if self.size(key) is None:
                raise ObjectMissingError(key=key)
            return b"" if into is None else 0
        read_piece, pool = partial(self._read_piece, key), self._threads.pool()
        for _ in range(_MAX_READS):
            try:
                if into is None:
                    return read_object(read_piece, pool, start, length)
                return read_object_into(read_piece, pool, start, into.cast("B"))
            except ChangedWhileReadError:
                continue
        raise StorageError(
            problem=f"{self._requests.url(key)} was overwritten during each of {_MAX_READS} reads.",
            way_out="Let one run write there at a time.",
        )

    def _read_piece(self, key: str, start: int, length: int, into: memoryview | None) -> Piece:
        def attempt() -> Piece:
            wanted = range_header(start, length)
            try:
                reply = self._requests.on_object("get_object", key, Range=wanted)
            except ClientError as error:
                if failure_of(error).http_status == 416:
                    return NOTHING
                raise
            return take_piece(reply, start, length, into, self._fill)

        return self._requests.retrying("read", key, attempt)

    def size(self, key: str) -> int | None:
        """Return the object's bytes, or None when there is none.

        Raises:
            StorageError: The store refused, or was out of reach for too long.
        """
        check_key(key)

        def attempt() -> int | None:
            try:
                return self._requests.on_object("head_object", key)["ContentLength"]
            except ClientError as error:
                if failure_of(error).http_status != 404:
                    raise
            self._requests.check_bucket()
            return None

        return self._requests.retrying("look up", key, attempt)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (key, bytes) of every object whose key starts with ``prefix``, sorted by key.

        Raises:
            StorageError: The store refused, or was out of reach for too long.
        """
        check_prefix(prefix)
        root = self._requests.name("")
        found: list[tuple[str, int]] = []
        page_of: dict[str, str] = {}
        while True:
            page = self._requests.retrying(
                "list",
                prefix,
                partial(self._requests.once, "list_objects_v2", Prefix=root + prefix, **page_of),
            )
            for item in page.get("Contents", ()):
                key = item["Key"].removeprefix(root)
                if key and not key.endswith("/"):  # consoles make such empty "folders"
                    found.append((key, item["Size"]))
            if not page.get("IsTruncated"):
                break
            page_of = {"ContinuationToken": page["NextContinuationToken"]}
        yield from sorted(found)  # AWS sorts; SeaweedFS lists "b/1" before "b.txt"

    def delete(self, key: str) -> None:
        """Remove the object; one that is not there is no error.

        Raises:
            StorageError: The store refused, or was out of reach for too long.
        """
        check_key(key)
        with suppress(ObjectMissingError):  # AWS says nothing; some servers say 404
            self._requests.retrying(
                "delete",
                key,
                partial(self._requests.on_object, "delete_object", key),
            )

    def stale_uploads(self, prefix: str, *, older_than_s: float) -> list[StaleUpload]:
        """Return the uploads in parts below ``prefix`` that were begun and never ended.

        Beyond the ObjectStore protocol. A writer that was killed leaves them, and they are paid
        for; their age is by the store's clock.

        Args:
            prefix: As in ``list``.
            older_than_s: Leaves out those begun later than this long ago by the store's clock: a
                live writer may still end them.

        Raises:
            StorageError: The store refused, or was out of reach for too long.
        """
        check_prefix(prefix)
        return stale_uploads(self._requests, prefix, older_than_s=older_than_s)

    def abort_upload(self, upload: StaleUpload) -> None:
        """Remove what has come of an upload; one that has ended since is no error.

        Raises:
            StorageError: The store refused, or was out of reach for too long.
        """
        abort_upload(self._requests, upload)
