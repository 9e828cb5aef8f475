# SPDX-License-Identifier: Apache-2.0
"""The doctor's check of storage on every store.

Real: the local filesystem, and SeaweedFS over loopback as S3. Faked: stores that break one promise
of the contract, so that each step can fail.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raydist.clock import SystemClock
from raydist.doctor.storage_check import (
    check_storage,
    check_store,
    open_for_check,
    put_marker,
    remove_marker,
    unseen_markers,
)
from raydist.errors import StorageError
from raydist.storage import ObjectStore, open_store
from raydist.testing.memory_store import MemoryStore
from raydist.testing.s3_server import S3Server

KIB = 1 << 10


@pytest.fixture
def s3_url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3_server.bucket}/doctor/{uuid.uuid4().hex}"


@pytest.fixture(params=["local", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "root")
    return request.getfixturevalue("s3_url")


def _check(store: ObjectStore) -> tuple[str | None, str]:
    facts = check_store(
        store, url="memory", node="node-1", clock=SystemClock(), object_bytes=64 * KIB
    )
    return facts.failed_step, facts.problem


def test_storage_that_keeps_its_promises_is_measured_and_left_as_it_was(url: str) -> None:
    facts = check_storage(url, node="gpu 1.example/a", clock=SystemClock())
    assert (facts.failed_step, facts.problem) == (None, "")
    assert facts.url == url
    assert (facts.upload_bytes_per_s or 0) > 0
    assert (facts.download_bytes_per_s or 0) > 0
    assert (facts.latency_s or 0) > 0
    assert list(open_store(url).list("")) == []


def test_directory_is_left_without_files_or_folders_of_the_node(tmp_path: Path) -> None:
    check_storage(str(tmp_path / "root"), node="n", clock=SystemClock(), object_bytes=KIB)
    assert [p.name for p in (tmp_path / "root").rglob("*")] == [".doctor"]


def test_markers_of_nodes_that_share_the_storage_are_seen_until_removed(url: str) -> None:
    stores = {node: open_for_check(url, clock=SystemClock()) for node in ("a.b", "c")}
    for node, store in stores.items():
        put_marker(store, session="s1", node=node)
    for store in stores.values():
        assert unseen_markers(store, session="s1", nodes=["a.b", "c"]) == ()
        assert unseen_markers(store, session="s2", nodes=["a.b", "c"]) == ("a.b", "c")
        assert unseen_markers(store, session="s1", nodes=["c", "d"]) == ("d",)
    for node, store in stores.items():
        remove_marker(store, session="s1", node=node)
    assert list(open_store(url).list("")) == []


def test_memory_store_is_whole() -> None:
    store = MemoryStore()
    assert _check(store) == (None, "")
    assert list(store.list("")) == []


class Overwriting(MemoryStore):
    """Ignores create-if-absent."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        super().put(key, data)


class ReadOnly(MemoryStore):
    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        raise StorageError(problem="AccessDenied.", way_out="Allow s3:PutObject.")


class Rotting(MemoryStore):
    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        data = super().get(key, start=start, length=length)
        return data[:-1] + bytes([data[-1] ^ 1])


class RangeFromZero(MemoryStore):
    """Ignores where a range starts."""

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        return super().get(key, length=length)


class Blind(MemoryStore):
    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        yield from ()


class Shrinking(MemoryStore):
    def size(self, key: str) -> int | None:
        size = super().size(key)
        return None if size is None else size - 1


class Keeping(MemoryStore):
    def delete(self, key: str) -> None:
        raise StorageError(problem="AccessDenied.", way_out="Allow s3:DeleteObject.")


class Crashing(MemoryStore):
    def size(self, key: str) -> int | None:
        raise KeyError("a fault of the store itself")


@pytest.mark.parametrize(
    ("make", "step", "words"),
    [
        (Overwriting, "put if absent", "created twice"),
        (ReadOnly, "put", "AccessDenied."),
        (Rotting, "get", "whether the bytes are those written"),
        (RangeFromZero, "ranged get", "whether 64 bytes from 21845"),
        (Blind, "list", "the list of objects"),
        (Shrinking, "size", "65535 for the size, and not 65536"),
        (Keeping, "delete", "AccessDenied."),
        (Crashing, "size", "KeyError: 'a fault of the store itself'"),
    ],
)
def test_store_that_breaks_a_promise_fails_at_that_step(
    make: Callable[[], MemoryStore], step: str, words: str
) -> None:
    store = make()
    failed_step, problem = _check(store)
    assert failed_step == step
    assert words in problem
    if make is not Keeping:
        assert list(MemoryStore.list(store, "")) == []


def test_bucket_that_is_not_there_is_a_fact_with_a_way_out(s3_url: str) -> None:
    facts = check_storage("s3://no-such-bucket/runs", node="n", clock=SystemClock())
    assert facts.failed_step == "put"
    assert "NoSuchBucket" in facts.problem
    assert "Create the bucket" in facts.way_out


@pytest.mark.parametrize("url", ["ftp://somewhere", ""])
def test_location_of_no_known_form_is_a_fact(url: str) -> None:
    facts = check_storage(url, node="n", clock=SystemClock())
    assert facts.failed_step == "open"
    assert facts.problem
    assert facts.way_out


def test_directory_that_is_a_file_is_a_fact(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    facts = check_storage(str(tmp_path / "file"), node="n", clock=SystemClock())
    assert facts.failed_step == "put"
    assert str(tmp_path / "file") in facts.problem
