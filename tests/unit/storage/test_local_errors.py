# SPDX-License-Identifier: Apache-2.0
"""LocalStore when the filesystem refuses. Real: a temporary directory. Faked: single calls."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from raydist.errors import StorageError
from raydist.storage.local import LocalStore


def fail(code: int):
    def raise_it(*args: object, **kwargs: object) -> int:
        raise OSError(code, os.strerror(code))

    return raise_it


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_failed_put_keeps_the_old_object_and_no_temporary_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str, code: int
) -> None:
    store = LocalStore(str(tmp_path))
    store.put("a/object", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail(code))
        with pytest.raises(StorageError, match=os.strerror(code)) as caught:
            store.put("a/object", b"new")
    assert str(tmp_path / "a/object") in caught.value.problem
    assert "--storage" in caught.value.way_out
    assert store.get("a/object") == b"old"
    assert os.listdir(tmp_path / "a") == ["object"]


def test_put_below_an_object_names_the_path(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.put("a", b"file")
    with pytest.raises(StorageError, match="a/b"):
        store.put("a/b", b"x")


def test_put_over_a_folder_is_refused(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.put("a/b", b"x")
    with pytest.raises(StorageError, match="Is a directory"):
        store.put("a", b"x")
    assert [key for key, _ in store.list("")] == ["a/b"]


def test_short_writes_are_continued(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, bytes(data)[:3]))
    store = LocalStore(str(tmp_path))
    store.put("object", b"0123456789")
    assert store.get("object") == b"0123456789"


def test_create_on_nfs_whose_reply_was_lost_succeeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real_link = os.link

    def link_twice(source: str, target: str) -> None:
        real_link(source, target)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    monkeypatch.setattr(os, "link", link_twice)
    store = LocalStore(str(tmp_path))
    store.put("entry", b"mine", if_absent=True)
    assert store.get("entry") == b"mine"
    assert os.listdir(tmp_path) == ["entry"]


def test_list_skips_files_still_being_written(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.put("a/object", b"x")
    (tmp_path / "a" / ".tmp-1-abc").write_bytes(b"half")
    assert list(store.list("")) == [("a/object", 1)]


def test_unreadable_folder_is_an_error_not_an_empty_list(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "scandir", fail(errno.EACCES))
    with pytest.raises(StorageError, match="Permission denied"):
        list(LocalStore(str(tmp_path)).list(""))


def test_append_adds_lines(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.append("metrics/attempt-0001.jsonl", b"{}\n")
    store.append("metrics/attempt-0001.jsonl", b"[]\n")
    assert store.get("metrics/attempt-0001.jsonl") == b"{}\n[]\n"


def test_append_to_a_folder_is_refused(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.put("a/b", b"x")
    with pytest.raises(StorageError, match="append to"):
        store.append("a", b"x")
