# SPDX-License-Identifier: Apache-2.0
"""What killed writers leave in a LocalStore. Real: a directory, and a writer killed in a put."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raydist.errors import StorageError
from raydist.storage.keys import TEMPORARY_PREFIX
from raydist.storage.local import LocalStore
from raydist.storage.stale_uploads import StaleUpload, StaleUploads
from raydist.testing.memory_store import MemoryStore

_DIES_IN_PUT = """
import os, signal, sys
from raydist.storage.local import LocalStore
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
os.makedirs(sys.argv[1] + "/a/b")
LocalStore(sys.argv[1]).put("a/b/object", b"half")
"""


def test_leftover_of_a_writer_killed_in_a_put_is_found_and_removed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _DIES_IN_PUT, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    store = LocalStore(str(tmp_path))
    assert isinstance(store, StaleUploads)
    assert list(store.list("")) == []
    (upload,) = store.stale_uploads("a/", older_than_s=0.0)
    (left,) = (tmp_path / "a/b").iterdir()
    assert (upload.key, upload.upload_id) == ("a/b/", left.name)
    os.utime(left, (0.0, 1e6))
    (old,) = store.stale_uploads("a/", older_than_s=upload.age_s + 1e6)
    assert old.upload_id == left.name
    for _ in range(2):  # the second finds nothing, and that is no error
        store.abort_upload(upload)
        assert store.stale_uploads("", older_than_s=0.0) == []
    assert not list((tmp_path / "a/b").iterdir())


def test_uploads_that_are_younger_are_left_out(tmp_path: Path) -> None:
    (tmp_path / f"{TEMPORARY_PREFIX}1").write_bytes(b"x")
    store = LocalStore(str(tmp_path))
    assert len(store.stale_uploads("", older_than_s=0.0)) == 1
    assert store.stale_uploads("", older_than_s=3600.0) == []


def test_uploads_are_those_below_the_prefix(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    assert store.stale_uploads("", older_than_s=0.0) == []
    for folder in ("", "a", "a/b", "ab"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{TEMPORARY_PREFIX}1").write_bytes(b"x")
        (tmp_path / folder / "object").write_bytes(b"x")

    def keys(prefix: str) -> list[str]:
        return sorted(upload.key for upload in store.stale_uploads(prefix, older_than_s=0.0))

    assert keys("") == ["", "a/", "a/b/", "ab/"]
    assert keys("a/") == ["a/", "a/b/"]
    assert keys("a") == ["a/", "a/b/", "ab/"]
    assert keys("c/") == []


def test_upload_that_cannot_be_removed_is_the_stores_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(StorageError, match="Permission denied"):
        LocalStore(str(tmp_path)).abort_upload(
            StaleUpload(key="", upload_id=f"{TEMPORARY_PREFIX}1", age_s=0.0)
        )


def test_store_without_unfinished_writes_has_no_such_methods() -> None:
    assert not isinstance(MemoryStore(), StaleUploads)
