# SPDX-License-Identifier: Apache-2.0
"""Writing an object from beginning to end without holding it in memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from typing import IO, Any

from raydist.storage.keys import TEMPORARY_PREFIX
from raydist.storage.local import LocalStore
from raydist.storage.local_errors import explained
from raydist.storage.store import ObjectStore


@contextlib.contextmanager
def sequential_writer(store: ObjectStore, key: str) -> Iterator[Callable[[Any], None]]:
    """Give a function that adds bytes to the object; it appears, whole, when the block ends well.

    A local object grows under a temporary name beside its own. Any other is laid out in an
    unnamed file in the system's temporary folder first, which needs that much room there.

    Args:
        store: Where the object goes.
        key: Its key; an object that has it is replaced.

    Raises:
        StorageError: The store or the filesystem refused.
    """
    if isinstance(store, LocalStore):
        with _renamed(store.path(key)) as write:
            yield write
        return
    with tempfile.TemporaryFile() as file:
        yield _explaining(file, tempfile.gettempdir())
        with explained("write", tempfile.gettempdir()):
            file.flush()
        if not file.tell():
            store.put(key, b"")
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            view = memoryview(mapped)
            try:
                store.put(key, view)
            finally:
                view.release()


@contextlib.contextmanager
def _renamed(path: str) -> Iterator[Callable[[Any], None]]:
    folder = os.path.dirname(path)
    temporary = os.path.join(folder, f"{TEMPORARY_PREFIX}{os.getpid()}-{uuid.uuid4().hex}")
    with explained("write", path):
        os.makedirs(folder, exist_ok=True)
        file = open(temporary, "xb")
    try:
        with file:
            yield _explaining(file, path)
            with explained("write", path):
                file.flush()
                os.fsync(file.fileno())
        with explained("write", path):
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):  # renamed: the usual end
            os.unlink(temporary)


def _explaining(file: IO[bytes], path: str) -> Callable[[Any], None]:
    """Return the file's write, its errors explained; those of its user stay as they are."""

    def write(data: Any) -> None:
        with explained("write", path):
            file.write(data)

    return write
