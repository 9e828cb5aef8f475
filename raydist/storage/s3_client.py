# SPDX-License-Identifier: Apache-2.0
"""The one boto3 client of a store in this process: where it points, when it is made anew."""

from __future__ import annotations

import ipaddress
import logging
import os
import threading
from typing import Any
from urllib.parse import urlsplit

from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import ClientError

from raydist.errors import ConfigError
from raydist.storage.s3_body import BodyView, RequestLimits
from raydist.storage.s3_errors import is_expired

_log = logging.getLogger(__name__)

_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


class S3Connection:
    """Makes the client lazily under a lock, and again after a fork or when credentials expire.

    Making clients is not thread-safe and a client may not cross processes (boto/boto3#1592).

    Args:
        endpoint_url: An S3-like server; None takes it from the environment, or means AWS.
        limits: How long one attempt at a request may take.
        num_connections: Connections kept open.

    Raises:
        ConfigError: The endpoint cannot be a URL of an HTTP server.
    """

    def __init__(
        self, *, endpoint_url: str | None, limits: RequestLimits, num_connections: int
    ) -> None:
        self._limits = limits
        self.endpoint_url = _find_endpoint(endpoint_url)
        self._num_connections = num_connections
        self._lock = threading.Lock()
        self._client: Any = None
        self._client_pid = 0

    @property
    def place(self) -> str:
        """Where requests go, for messages."""
        if self.endpoint_url is not None:
            return f"endpoint {self.endpoint_url}"
        region = self._client.meta.region_name if self._client is not None else None
        return f"region {region or 'not set'}"

    def call(self, operation: str, **arguments: Any) -> Any:
        """Make one request; when the credentials have expired, one more with fresh ones.

        Args:
            operation: boto3's name of it, such as ``put_object``.
            **arguments: Its parameters; a Body is a memoryview, sent without a copy.

        Raises:
            botocore.exceptions.ClientError: The store answered with an error.
            botocore.exceptions.BotoCoreError: The request or its reply did not get through.
        """
        client = self._current_client()
        try:
            return getattr(client, operation)(**_streamed(arguments))
        except ClientError as error:
            if not is_expired(error):
                raise
            self._discard(client)
        return getattr(self._current_client(), operation)(**_streamed(arguments))

    def _current_client(self) -> Any:
        with self._lock:
            if self._client is None or self._client_pid != os.getpid():
                self._client = self._make_client()
                self._client_pid = os.getpid()
            return self._client

    def _discard(self, stale: Any) -> None:
        with self._lock:
            if self._client is stale:  # else another thread has replaced it already
                _log.warning("storage: credentials expired, reading them anew")
                self._client = None

    def _make_client(self) -> Any:
        if os.environ.get("AWS_SESSION_TOKEN"):
            _log.warning(
                "storage: AWS_SESSION_TOKEN holds temporary credentials that nothing renews; "
                "a run that outlives them cannot save"
            )
        s3_options: dict[str, Any] = {
            "payload_signing_enabled": not is_private_line(self.endpoint_url)
        }
        options: dict[str, Any] = {}
        if self.endpoint_url is not None:
            s3_options["addressing_style"] = "path"
            # boto3 >= 1.36 sends checksums that S3-like stores refuse or store (boto/boto3#4398).
            options["request_checksum_calculation"] = "when_required"
            options["response_checksum_validation"] = "when_required"
        config = Config(
            connect_timeout=self._limits.connect_s,
            read_timeout=self._limits.silence_s,
            tcp_keepalive=True,
            max_pool_connections=self._num_connections,
            retries={"total_max_attempts": 1},  # raydist.storage.retry does it
            s3=s3_options,
            **options,
        )
        session = Session()  # the shared default session is not thread-safe
        return session.client("s3", endpoint_url=self.endpoint_url, config=config)


def is_private_line(endpoint_url: str | None) -> bool:
    """Whether nobody between here and the store can alter a body: TLS, or loopback.

    There the SHA-256 of every body, two thirds of an upload's CPU, proves nothing more.
    """
    if endpoint_url is None:
        return True
    parts = urlsplit(endpoint_url)
    if parts.scheme == "https" or parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:  # a name: where it leads is not known
        return False


def _streamed(arguments: dict[str, Any]) -> dict[str, Any]:
    """Wrap a body anew for each attempt: one that was sent is spent."""
    body = arguments.get("Body")
    return arguments if body is None else {**arguments, "Body": BodyView(body)}


def _find_endpoint(argument: str | None) -> str | None:
    """Return the checked endpoint: the argument, else the environment's, else None for AWS.

    Raises:
        ConfigError: It cannot be the URL of an HTTP server, or holds credentials.
    """
    name, value = "endpoint_url", argument
    for variable in _ENDPOINT_VARIABLES:
        if value:
            break
        name, value = variable, os.environ.get(variable)
    if not value:
        return None
    parts = urlsplit(value)
    if parts.username is not None or "@" in value:
        raise ConfigError(
            problem=f"{name} holds a user name or password.",
            way_out="Credentials go into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        )
    if "://" not in value:
        raise ConfigError(
            problem=f"{name}={value} has no scheme.",
            way_out=f"Set it to http://{value} or https://{value}.",
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or not _has_usable_port(value):
        raise ConfigError(
            problem=f"{name}={value} is not the address of an HTTP server.",
            way_out="Set it to http://host:port or https://host:port.",
        )
    return value


def _has_usable_port(url: str) -> bool:
    try:
        return urlsplit(url).port != 0
    except ValueError:  # urllib's word for a port that is no number or above 65535
        return False
