# SPDX-License-Identifier: Apache-2.0
"""Requests on one bucket: named, retried under a policy, and explained when they fail for good."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

from botocore.exceptions import ClientError

from raydist.clock import Clock
from raydist.storage.retry import RetryPolicy, call_with_retry
from raydist.storage.s3_client import S3Connection
from raydist.storage.s3_errors import REQUEST_ERRORS, deserves_retry, explain, failure_of

T = TypeVar("T")


class BucketRequests:
    """What S3Store asks of the network; every key is relative to the prefix.

    Args:
        bucket: The bucket's name.
        prefix: Put before every key, with a ``/`` between; may be empty.
        connection: Where requests go.
        policy: How long a request is tried again.
        clock: Time, for the waits between attempts.
        rng: Jitter.
    """

    def __init__(
        self,
        *,
        bucket: str,
        prefix: str,
        connection: S3Connection,
        policy: RetryPolicy,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._connection = connection
        self._policy = policy
        self._clock = clock
        self._rng = rng
        self._has_seen_bucket = False

    @property
    def place(self) -> str:
        """Where requests go, for messages."""
        return self._connection.place

    @property
    def is_aws(self) -> bool:
        """Whether this is AWS's own S3, not a server that speaks its protocol."""
        return self._connection.endpoint_url is None

    def name(self, key: str) -> str:
        """Return the object's name in the bucket."""
        return f"{self._prefix}/{key}" if self._prefix else key

    def url(self, key: str) -> str:
        """Return the object's URL, for messages."""
        return f"s3://{self._bucket}/{self.name(key)}".rstrip("/")

    def once(self, operation: str, **arguments: Any) -> Any:
        """Make one request on the bucket.

        Args:
            operation: boto3's name of it, such as ``put_object``.
            **arguments: Its parameters, the bucket apart.

        Raises:
            botocore.exceptions.ClientError: The store answered with an error.
            botocore.exceptions.BotoCoreError: The request or its reply did not get through.
        """
        reply = self._connection.call(operation, Bucket=self._bucket, **arguments)
        self._has_seen_bucket = True
        return reply

    def on_object(self, operation: str, key: str, **arguments: Any) -> Any:
        """Make one request on one object; as ``once``."""
        return self.once(operation, Key=self.name(key), **arguments)

    def check_bucket(self) -> None:
        """Tell a missing bucket from a missing object, once; a HEAD says 404 for both.

        Raises:
            botocore.exceptions.ClientError: NoSuchBucket, or the store answered otherwise.
            botocore.exceptions.BotoCoreError: The request or its reply did not get through.
        """
        if self._has_seen_bucket:
            return
        try:
            self.once("head_bucket")
        except ClientError as error:
            status = failure_of(error).http_status
            if status == 404:
                error.response["Error"]["Code"] = "NoSuchBucket"
            if status != 403:  # it is there, but these credentials may not look at it
                raise

    def retrying(self, action: str, key: str, attempt: Callable[[], T]) -> T:
        """Run ``attempt`` under the policy.

        Args:
            action: What it does, such as ``write``, for the message.
            key: The object it is about.
            attempt: Makes requests with ``once``.

        Returns:
            What ``attempt`` returned.

        Raises:
            StorageError: It failed for good.
        """
        try:
            return call_with_retry(
                attempt,
                policy=self._policy,
                clock=self._clock,
                rng=self._rng,
                classify=deserves_retry,
            )
        except REQUEST_ERRORS as error:
            url, place = self.url(key), self.place
            explained = explain(error, action=action, key=key, url=url, place=place)
            raise explained from error
