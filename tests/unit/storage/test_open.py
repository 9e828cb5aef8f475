# SPDX-License-Identifier: Apache-2.0
"""What may stand after --storage, and whether it can be written. Real: a temporary directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raydist.errors import ConfigError, FailureKind, ObjectExistsError, StorageUnusableError
from raydist.storage import open as storage_open
from raydist.storage.local import LocalStore
from raydist.storage.open import absolute_url, check_writable, open_store, parse_url
from raydist.storage.s3 import S3Store
from raydist.testing.memory_store import MemoryStore


def local_root(url: str) -> str:
    store = open_store(url)
    assert isinstance(store, LocalStore)
    return store.root


def test_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert local_root("runs/a") == str(tmp_path / "runs/a")
    assert local_root("~/runs") == "/home/someone/runs"
    assert local_root("/abs/./runs/../x") == "/abs/x"
    assert local_root("file:///abs/my%20runs") == "/abs/my runs"


def test_s3_url_is_bucket_and_prefix() -> None:
    assert isinstance(open_store("s3://bucket/runs"), S3Store)
    location = parse_url("s3://bucket/a/b/")
    assert (location.bucket, location.path) == ("bucket", "a/b")
    assert parse_url("s3://bucket").path == ""
    assert parse_url("s3://bucket/").path == ""


def test_absolute_url_means_the_same_everywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    url = absolute_url("my runs/100%")
    monkeypatch.chdir("/")
    assert local_root(url) == str(tmp_path / "my runs/100%")
    assert absolute_url(url) == url
    assert absolute_url("s3://bucket/a/") == "s3://bucket/a"
    assert absolute_url("s3://bucket") == "s3://bucket"


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("s3://", "names no bucket"),
        ("s3:", "names no bucket"),
        ("s3:///", "names no bucket"),
        ("s3:/bucket/runs", "Use s3://bucket/runs."),
        ("s3:bucket/runs", "Use s3://bucket/runs."),
        ("s3:///bucket/runs", "Use s3://bucket/runs."),
        ("S3://bucket/runs", "Use s3://bucket/runs."),
        ("s3a://bucket/runs", "Use s3://bucket/runs."),
        ("gs://bucket/runs", "no store for"),
        ("https://bucket.s3.amazonaws.com", "no store for"),
        ("file:/abs", "Use file:///abs."),
        ("file://host/abs", "file:///absolute/path"),
        ("", "is empty"),
        (" s3://bucket", "spaces"),
        ("~no-such-user-here/runs", "home directory"),
        ("s3://bucket/a/../b", "'..'"),
    ],
)
def test_other_forms_are_refused_with_the_correction(url: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert hint in str(caught.value)
    assert caught.value.kind is FailureKind.INPUT


def test_local_storage_imports_no_boto3() -> None:
    code = (
        "import sys; from raydist.storage import open_store; open_store('/tmp/runs'); "
        "sys.exit(any(name.split('.')[0] in ('boto3', 'botocore') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_check_writable_makes_nothing(tmp_path: Path) -> None:
    check_writable(str(tmp_path / "not" / "yet" / "there"))
    assert list(tmp_path.iterdir()) == []


def test_check_writable_below_a_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageUnusableError) as caught:
        check_writable(str(tmp_path / "file" / "runs"))
    assert str(tmp_path / "file") in caught.value.problem
    assert "--storage" in caught.value.way_out
    assert caught.value.kind is FailureKind.INPUT


def test_check_writable_refused_by_the_system_names_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(path: str, flags: int, mode: int = 0) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "open", refuse)  # root may write everywhere
    with pytest.raises(StorageUnusableError, match="Permission denied") as caught:
        check_writable(str(tmp_path / "runs"))
    assert str(tmp_path) in caught.value.problem


class ForgetfulStore(MemoryStore):
    """Ignores If-None-Match, as some S3-like servers do."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        super().put(key, data)


class AlteringStore(MemoryStore):
    """Stores more than it was given, as boto/boto3#4398 describes."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        super().put(key, bytes(data) + b"x-amz-checksum", if_absent=if_absent)


@pytest.mark.parametrize(
    ("store", "fault"),
    [(ForgetfulStore(), "If-None-Match"), (AlteringStore(), "other bytes")],
)
def test_check_writable_finds_stores_that_break_the_contract(
    monkeypatch: pytest.MonkeyPatch, store: MemoryStore, fault: str
) -> None:
    monkeypatch.setattr(storage_open, "_open", lambda location, policy: store)
    with pytest.raises(StorageUnusableError, match=fault):
        check_writable("s3://bucket/runs")
    assert list(store.list("")) == []


class ForeignStore(MemoryStore):
    """Says that every key is taken."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        raise ObjectExistsError(key=key)


def test_check_writable_error_without_problem_still_says_what(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage_open, "_open", lambda location, policy: ForeignStore())
    with pytest.raises(
        StorageUnusableError, match=r"s3://bucket/runs cannot be used\. object .* exists already"
    ):
        check_writable("s3://bucket/runs")
