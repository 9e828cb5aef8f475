# SPDX-License-Identifier: Apache-2.0
"""Objects as files below one directory: a local disk, or a filesystem every node mounts."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import time
import uuid
from collections.abc import Iterator
from typing import overload

from raydist.errors import ObjectExistsError, ObjectMissingError
from raydist.storage.keys import TEMPORARY_PREFIX, check_key, check_prefix, check_range
from raydist.storage.local_errors import explained
from raydist.storage.stale_uploads import StaleUpload

_NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""What the system says for a key without an object; a directory is only the start of keys."""


class LocalStore:
    """An ObjectStore on a directory; created with the first object.

    One difference from S3 stays: a key cannot hold an object and be the folder of another.
    A process killed inside ``put`` may leave a temporary file behind, which only
    ``stale_uploads`` shows.

    Args:
        root: The directory; made absolute.
    """

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)

    def __repr__(self) -> str:
        return f"LocalStore({self.root!r})"

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        """Write one object whole and durable: temporary file, fsync, rename or link, fsync.

        Raises:
            ObjectExistsError: ``if_absent`` and the key is taken.
            StorageError: The filesystem refused.
        """
        path = self.path(key)
        folder = os.path.dirname(path)
        with explained("write", path):
            _make_durable_folder(folder)
            with _temporary_file(folder) as (descriptor, temporary):
                _write_all(descriptor, data)
                os.fsync(descriptor)
                if if_absent:
                    _link_if_absent(temporary, path, key)
                else:
                    os.replace(temporary, path)
            _sync_folder(folder)

    def append(self, key: str, data: bytes) -> None:
        """Add ``data`` to the end of the object, made when missing; for lines of metrics.

        Not part of the protocol, because S3 cannot do it. Not synced to disk.

        Raises:
            StorageError: The filesystem refused.
        """
        path = self.path(key)
        with explained("append to", path):
            _make_durable_folder(os.path.dirname(path))
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                _write_all(descriptor, data)
            finally:
                os.close(descriptor)

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
        """Return ``length`` bytes from ``start``; short past the end.

        With ``into``: fill it and return the number of bytes.

        Raises:
            ObjectMissingError: No such object.
            StorageError: The filesystem refused.
        """
        check_range(start, length)
        path = self.path(key)
        with explained("read", path):
            try:
                with open(path, "rb", buffering=0) as file:
                    available = max(0, os.fstat(file.fileno()).st_size - start)
                    file.seek(start)
                    if into is not None:
                        return _read_into(file, into.cast("B"))
                    wanted = available if length is None else min(length, available)
                    buffer = io.BytesIO(bytes(wanted))
                    with buffer.getbuffer() as view:
                        count = _read_into(file, view)
                    return buffer.getvalue()[:count]
            except _NOT_THERE as error:
                raise ObjectMissingError(key=key) from error

    def size(self, key: str) -> int | None:
        """Return the object's bytes, or None when there is none.

        Raises:
            StorageError: The filesystem refused.
        """
        return self._size_of(self.path(key))

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (key, bytes) of every object whose key starts with ``prefix``, sorted by key.

        Raises:
            StorageError: The filesystem refused.
        """
        check_prefix(prefix)
        top = os.path.join(self.root, prefix.rpartition("/")[0])
        keys: list[str] = []
        with explained("list", top):
            for folder, _, names in os.walk(top, onerror=_refuse_to_skip):
                relative = os.path.relpath(folder, self.root)
                start = "" if relative == os.curdir else relative + "/"
                keys.extend(start + name for name in names if not name.startswith(TEMPORARY_PREFIX))
        for key in sorted(key for key in keys if key.startswith(prefix)):
            size_bytes = self._size_of(os.path.join(self.root, key))
            if size_bytes is not None:
                yield key, size_bytes

    def delete(self, key: str) -> None:
        """Remove the object; one that is not there is no error.

        Raises:
            StorageError: The filesystem refused.
        """
        path = self.path(key)
        with explained("delete", path), contextlib.suppress(*_NOT_THERE):
            os.unlink(path)

    def stale_uploads(self, prefix: str, *, older_than_s: float) -> list[StaleUpload]:
        """Return the temporary files below ``prefix`` not touched for so long.

        Raises:
            StorageError: The filesystem refused.
        """
        check_prefix(prefix)
        top = os.path.join(self.root, prefix.rpartition("/")[0])
        found: list[StaleUpload] = []
        with explained("list", top):
            for folder, _, names in os.walk(top, onerror=_refuse_to_skip):
                relative = os.path.relpath(folder, self.root)
                key = "" if relative == os.curdir else relative + "/"
                for name in names:
                    if not name.startswith(TEMPORARY_PREFIX) or not key.startswith(prefix):
                        continue
                    with contextlib.suppress(*_NOT_THERE):  # its writer has just ended it
                        age_s = time.time() - os.stat(os.path.join(folder, name)).st_mtime
                        found.append(StaleUpload(key=key, upload_id=name, age_s=age_s))
        return [upload for upload in found if upload.age_s >= older_than_s]

    def abort_upload(self, upload: StaleUpload) -> None:
        """Remove a temporary file; one that is not there is no error.

        Raises:
            StorageError: The filesystem refused.
        """
        path = os.path.join(self.root, upload.key, upload.upload_id)
        with explained("delete", path), contextlib.suppress(*_NOT_THERE):
            os.unlink(path)

    def path(self, key: str) -> str:
        """Return the file that holds ``key``, whether or not it exists."""
        check_key(key)
        return os.path.join(self.root, key)

    def _size_of(self, path: str) -> int | None:
        with explained("look up", path):
            try:
                status = os.stat(path)
            except _NOT_THERE:
                return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None


def check_directory_writable(root: str) -> None:
    """Prove that objects can be made below ``root``, leaving nothing behind.

    Tries in the nearest directory that exists, so a run that never starts makes none.

    Raises:
        StorageError: A file cannot be made, linked or removed there.
    """
    folder = os.path.abspath(root)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    with explained("write in", folder), _temporary_file(folder) as (descriptor, temporary):
        _write_all(descriptor, b"raydist")
        os.fsync(descriptor)
        second = temporary + ".link"
        os.link(temporary, second)
        os.unlink(second)


@contextlib.contextmanager
def _temporary_file(folder: str) -> Iterator[tuple[int, str]]:
    """Open a new file in ``folder`` for writing; whatever happens, its name is gone afterwards."""
    path = os.path.join(folder, f"{TEMPORARY_PREFIX}{os.getpid()}-{uuid.uuid4().hex}")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor, path
    finally:
        os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):  # renamed: the usual end
            os.unlink(path)


def _read_into(file: io.FileIO, view: memoryview) -> int:
    at = 0
    while at < view.nbytes and (count := file.readinto(view[at:])):  # at most 2 GiB at a time
        at += count
    return at


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B")
    while view.nbytes:  # one write moves at most 2 GiB
        view = view[os.write(descriptor, view) :]


def _link_if_absent(temporary: str, path: str, key: str) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError as error:
        # NFS answers a repeated request for a link that was made, but whose reply was lost,
        # with EEXIST (link(2), BUGS).
        if not os.path.samefile(temporary, path):
            raise ObjectExistsError(key=key) from error


def _make_durable_folder(folder: str) -> None:
    """Make ``folder`` and its missing parents, each synced into its own parent.

    Raises:
        FileExistsError: One of them is a file.
    """
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    if parent != folder:
        _make_durable_folder(parent)
    try:
        os.mkdir(folder)
    except FileExistsError:
        if not os.path.isdir(folder):  # another writer making the same folder is fine
            raise
    _sync_folder(parent)


def _refuse_to_skip(error: OSError) -> None:
    if not isinstance(error, _NOT_THERE):  # os.walk alone would pass over it
        raise error


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some FUSE and CIFS mounts cannot
            raise
    finally:
        os.close(descriptor)
