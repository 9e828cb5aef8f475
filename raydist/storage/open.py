# SPDX-License-Identifier: Apache-2.0
"""From what the user types after --storage to a store, and whether it can be written."""

from __future__ import annotations

import os
import re
import uuid
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import quote, unquote

from raydist.errors import ConfigError, ObjectExistsError, StorageError, StorageUnusableError
from raydist.storage.keys import check_key
from raydist.storage.local import LocalStore, check_directory_writable
from raydist.storage.retry import RetryPolicy
from raydist.storage.store import ObjectStore

ACCEPTED_FORMS = "s3://bucket/prefix, file:///absolute/path, or a directory such as ~/runs"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/{0,2})(.*)", re.DOTALL)
_PROBE_POLICY = RetryPolicy(max_attempts=3, base_delay_s=0.5, max_delay_s=2.0, total_limit_s=10.0)
"""A location is checked with someone waiting: seconds, not the minutes a running job allows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """A storage URL taken apart."""

    bucket: str | None
    """None: a directory."""
    path: str
    """Prefix inside the bucket, without outer slashes; or an absolute directory."""

    @property
    def url(self) -> str:
        """The same place, independent of the working directory and the user."""
        if self.bucket is None:
            return f"file://{quote(self.path)}"
        return f"s3://{self.bucket}/{self.path}".rstrip("/")


def parse_url(url: str) -> Location:
    """Take a storage URL or path apart; touches neither disk nor network.

    Raises:
        ConfigError: Not one of the accepted forms.
    """
    if not url or url != url.strip():
        _refuse(url, "is empty or has spaces around it")
    match = _SCHEME.fullmatch(url)
    if match is None:
        path = os.path.expanduser(url)
        if path.startswith("~"):
            _refuse(url, "names a user without a home directory here")
        return Location(bucket=None, path=os.path.abspath(path))
    scheme, slashes, rest = match.groups()
    if scheme.lower() == "s3":
        return _parse_s3(url, scheme, slashes, rest)
    if scheme == "file":
        if slashes != "//" or not rest.startswith("/"):
            _refuse(url, "is not file:// and then an absolute path", f"file:///{rest}")
        return Location(bucket=None, path=os.path.abspath(unquote(rest)))
    if scheme in ("s3a", "s3n"):
        _refuse(url, f"has the scheme {scheme}", f"s3://{rest}")
    _refuse(url, f"has the scheme {scheme}, which raydist has no store for")


def _parse_s3(url: str, scheme: str, slashes: str, rest: str) -> Location:
    bucket, _, prefix = rest.lstrip("/").partition("/")
    if not bucket:
        _refuse(url, "names no bucket")
    if scheme != "s3" or slashes != "//" or rest.startswith("/"):
        _refuse(url, "is not s3:// and then a bucket", f"s3://{bucket}/{prefix}".strip("/"))
    prefix = prefix.strip("/")
    if prefix:
        check_key(prefix)
    return Location(bucket=bucket, path=prefix)


def _refuse(url: str, fault: str, correction: str | None = None) -> NoReturn:
    """Say what is wrong with a storage URL.

    Raises:
        ConfigError: Always.
    """
    hint = f"Use {correction}. " if correction else ""
    raise ConfigError(
        problem=f"--storage {url!r} {fault}.",
        way_out=f"{hint}Accepted are {ACCEPTED_FORMS}.",
    )


def absolute_url(url: str) -> str:
    """Return ``url`` as every process of the run can use it: ``~`` and relative paths resolved.

    Called once by the driver; a Ray worker has another working directory.

    Raises:
        ConfigError: Not one of the accepted forms.
    """
    return parse_url(url).url


def open_store(url: str) -> ObjectStore:
    """Return the store at ``url``; one per process, never sent to another.

    Does not touch the location: whether it can be used shows ``check_writable``.

    Raises:
        ConfigError: Not one of the accepted forms, or an S3 endpoint without a scheme.
    """
    return _open(parse_url(url), policy=None)


def _open(location: Location, *, policy: RetryPolicy | None) -> ObjectStore:
    if location.bucket is None:
        return LocalStore(location.path)
    from raydist.storage.s3 import S3Store  # boto3 only where it is used (ray-project/ray#48187)

    return S3Store(location.bucket, location.path, policy=policy or RetryPolicy())


def check_writable(url: str) -> None:
    """Prove that a run can keep its objects at ``url``, leaving nothing behind.

    A directory: makes, links and removes a file in the nearest one that exists. S3: creates,
    reads and deletes one object under the prefix, and checks that it cannot be created twice,
    since that is what keeps two writers of one run apart.

    Raises:
        ConfigError: ``url`` is not one of the accepted forms.
        StorageUnusableError: Something of that failed.
    """
    location = parse_url(url)
    try:
        if location.bucket is None:
            check_directory_writable(location.path)
        else:
            _probe(_open(location, policy=_PROBE_POLICY), location.url)
    except StorageUnusableError:
        raise
    except StorageError as error:
        raise StorageUnusableError(
            problem=f"--storage {url} cannot be used. {error.problem or error}",
            way_out=error.way_out or "Choose another --storage.",
        ) from error


def _probe(store: ObjectStore, url: str) -> None:
    key = f"raydist-probe-{uuid.uuid4().hex}"
    written = key.encode()
    store.put(key, written, if_absent=True)
    try:
        read = store.get(key)
        if read != written:
            raise StorageUnusableError(
                problem=f"{url} returned {len(read)} other bytes than the {len(written)} written.",
                way_out="Use a store that keeps objects as they are, or choose another --storage.",
            )
        _check_create_if_absent(store, key, url)
    finally:
        store.delete(key)


def _check_create_if_absent(store: ObjectStore, key: str, url: str) -> None:
    try:
        store.put(key, b"a second creator", if_absent=True)
    except ObjectExistsError:
        return
    raise StorageUnusableError(
        problem=f"{url} created the same object twice: it ignores If-None-Match.",
        way_out="Use an S3 store with conditional writes, or choose another --storage.",
    )
