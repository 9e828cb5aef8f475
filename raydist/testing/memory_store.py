# SPDX-License-Identifier: Apache-2.0
"""An ObjectStore in this process's memory, for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import overload

from raydist.errors import ObjectExistsError, ObjectMissingError
from raydist.storage.keys import check_key, check_prefix, check_range


class MemoryStore:
    """The ObjectStore contract over a dictionary; every method is one step to other threads."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        """Keep a copy of ``data``.

        Raises:
            ObjectExistsError: ``if_absent`` and the key is taken.
        """
        check_key(key)
        copy = bytes(data)
        with self._lock:
            if if_absent and key in self._objects:
                raise ObjectExistsError(key=key)
            self._objects[key] = copy

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
        """
        check_key(key)
        check_range(start, length)
        with self._lock:
            data = self._objects.get(key)
        if data is None:
            raise ObjectMissingError(key=key)
        if into is None:
            return data[start:] if length is None else data[start : start + length]
        view = into.cast("B")
        piece = memoryview(data)[start : start + view.nbytes]
        view[: piece.nbytes] = piece
        return piece.nbytes

    def size(self, key: str) -> int | None:
        """Return the object's bytes, or None when there is none."""
        check_key(key)
        with self._lock:
            data = self._objects.get(key)
        return None if data is None else len(data)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (key, bytes) of every object whose key starts with ``prefix``, sorted by key."""
        check_prefix(prefix)
        with self._lock:
            found = [(key, len(data)) for key, data in self._objects.items()]
        yield from sorted(item for item in found if item[0].startswith(prefix))

    def delete(self, key: str) -> None:
        """Forget the object; one that is not there is no error."""
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)
