# SPDX-License-Identifier: Apache-2.0
"""Doing on one node what a run does with its storage, and measuring it. Failures are facts."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from raydist.clock import Clock
from raydist.doctor.facts import StorageFacts
from raydist.errors import ObjectExistsError, RaydistError, StorageError
from raydist.storage import ObjectStore
from raydist.storage.local import LocalStore
from raydist.storage.open import parse_url
from raydist.storage.retry import RetryPolicy

MIB = 1 << 20

FOLDER = ".doctor"
"""Below the storage's root; every object there is removed by whoever put it."""

_POLICY = RetryPolicy(max_attempts=3, base_delay_s=0.5, max_delay_s=2.0, total_limit_s=10.0)
"""Somebody is waiting: seconds, not the minutes a running job allows."""


def check_storage(
    url: str, *, node: str, clock: Clock, object_bytes: int = 8 * MIB
) -> StorageFacts:
    """Open the storage at ``url`` and check it as ``check_store`` does.

    Args:
        url: As after --storage.
        node: This node's name, for the key.
        clock: Time, for the rates.
        object_bytes: Of the object whose transfer is measured.
    """
    try:
        store = open_for_check(url, clock=clock)
    except Exception as error:
        return _failed(StorageFacts(url=url), "open", error)
    return check_store(store, url=url, node=node, clock=clock, object_bytes=object_bytes)


def open_for_check(url: str, *, clock: Clock) -> ObjectStore:
    """Return the store at ``url`` with retries that end within seconds.

    Raises:
        ConfigError: Not a storage location.
    """
    location = parse_url(url)
    if location.bucket is None:
        return LocalStore(location.path)
    from raydist.storage.s3 import S3Store  # boto3 only where it is used

    return S3Store(location.bucket, location.path, policy=_POLICY, clock=clock)


def check_store(
    store: ObjectStore, *, url: str, node: str, clock: Clock, object_bytes: int = 8 * MIB
) -> StorageFacts:
    """Put, put again if absent, read whole and in part, list and delete objects of a unique name.

    Stops at the first step that fails, names it, and removes its objects in any case.

    Args:
        store: What is checked.
        url: Its name in the facts.
        node: This node's name, for the key.
        clock: Time, for the rates.
        object_bytes: Of the object whose transfer is measured; random, so that nothing packs it.
    """
    folder = f"{FOLDER}/{_key_part(node)}-{uuid.uuid4().hex}"
    check = _Check(store, folder, clock, os.urandom(object_bytes))
    facts = StorageFacts(url=url)
    steps: tuple[tuple[str, Callable[[StorageFacts], StorageFacts]], ...] = (
        ("put", check.put),
        ("put if absent", check.put_if_absent),
        ("size", check.size),
        ("get", check.get),
        ("ranged get", check.get_range),
        ("list", check.list),
    )
    try:
        for step, act in steps:
            try:
                facts = act(facts)
            except Exception as error:
                facts = _failed(facts, step, error)
                break
    finally:
        try:
            check.delete()
        except Exception as error:
            facts = facts if facts.failed_step else _failed(facts, "delete", error)
    return facts


class _Check:
    """The steps, over two objects: a large one that is measured and a small one that is created."""

    def __init__(self, store: ObjectStore, folder: str, clock: Clock, data: bytes) -> None:
        self._store = store
        self._folder = folder
        self._clock = clock
        self._data = data
        self._large, self._small = f"{folder}/large", f"{folder}/small"

    def put(self, facts: StorageFacts) -> StorageFacts:
        started_s = self._clock.monotonic_s()
        self._store.put(self._large, self._data)
        return replace(facts, upload_bytes_per_s=self._rate(started_s))

    def put_if_absent(self, facts: StorageFacts) -> StorageFacts:
        self._store.put(self._small, b"the first creator", if_absent=True)
        try:
            self._store.put(self._small, b"the second creator", if_absent=True)
        except ObjectExistsError:
            return facts
        raise StorageError(
            problem="The same object was created twice: two writers of a run could not be kept "
            "apart.",
            way_out="Use a store with conditional writes (If-None-Match), or another --storage.",
        )

    def size(self, facts: StorageFacts) -> StorageFacts:
        self._expect(self._store.size(self._large), len(self._data), "the size")
        self._expect(self._store.size(f"{self._folder}/none"), None, "the size of no object")
        return facts

    def get(self, facts: StorageFacts) -> StorageFacts:
        started_s = self._clock.monotonic_s()
        read = self._store.get(self._large)
        rate = self._rate(started_s)
        self._expect(len(read), len(self._data), "the number of bytes read")
        self._expect(read == self._data, True, "whether the bytes are those written")
        return replace(facts, download_bytes_per_s=rate)

    def get_range(self, facts: StorageFacts) -> StorageFacts:
        start = len(self._data) // 3
        started_s = self._clock.monotonic_s()
        read = self._store.get(self._large, start=start, length=64)
        latency_s = self._clock.monotonic_s() - started_s
        is_same = read == self._data[start : start + 64]
        self._expect(is_same, True, f"whether 64 bytes from {start} are those written")
        return replace(facts, latency_s=latency_s)

    def list(self, facts: StorageFacts) -> StorageFacts:
        found = [key for key, _ in self._store.list(f"{self._folder}/")]
        self._expect(found, [self._large, self._small], "the list of objects")
        return facts

    def delete(self) -> None:
        errors = []
        for key in (self._large, self._small):
            try:
                self._store.delete(key)
            except RaydistError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        if isinstance(self._store, LocalStore):
            # .doctor itself stays: another node may be about to write below it.
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(self._store.path(self._folder))

    def _rate(self, started_s: float) -> float | None:
        seconds = self._clock.monotonic_s() - started_s
        return len(self._data) / seconds if seconds > 0 else None

    def _expect(self, found: object, expected: object, what: str) -> None:
        if found != expected:
            raise StorageError(
                problem=f"The store gives {found!r} for {what}, and not {expected!r}.",
                way_out="Use a store that keeps objects as they are, or another --storage.",
            )


def put_marker(store: ObjectStore, *, session: str, node: str) -> None:
    """Leave an object by which other nodes see that this one writes to the same place.

    Raises:
        StorageError: The store refused.
    """
    store.put(_marker(session, node), node.encode())


def unseen_markers(store: ObjectStore, *, session: str, nodes: Sequence[str]) -> tuple[str, ...]:
    """Return those of ``nodes`` whose marker is not there, once all have put theirs.

    Raises:
        StorageError: The store refused.
    """
    return tuple(node for node in nodes if store.size(_marker(session, node)) is None)


def remove_marker(store: ObjectStore, *, session: str, node: str) -> None:
    """Take this node's marker away.

    Raises:
        StorageError: The store refused.
    """
    store.delete(_marker(session, node))
    if isinstance(store, LocalStore):
        # The last node's goes with the folder.
        with contextlib.suppress(OSError):
            os.rmdir(store.path(f"{FOLDER}/{session}"))


def _marker(session: str, node: str) -> str:
    return f"{FOLDER}/{session}/{_key_part(node)}"


def _key_part(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9-]", "_", name)


def _failed(facts: StorageFacts, step: str, error: Exception) -> StorageFacts:
    """Turn what was raised into a fact, its words kept."""
    if isinstance(error, RaydistError):
        problem, way_out = error.problem or str(error), error.way_out
    else:
        problem, way_out = f"{type(error).__name__}: {error}", ""
    return replace(facts, failed_step=step, problem=problem, way_out=way_out)
