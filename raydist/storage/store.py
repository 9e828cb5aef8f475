# SPDX-License-Identifier: Apache-2.0
"""The one seam for bytes: five methods over keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, overload


class ObjectStore(Protocol):
    """Objects under keys, below one root.

    A key is a relative ``/``-separated string without ``.`` or ``..`` parts (a ``str``, since
    ``Path`` collapses ``s3://``). Every method raises StorageError for a failure that outlived
    its retries. Implementations are safe to use from several threads of one process and are
    never pickled: open one per process with ``open_store``.
    """

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        """Write one object whole: a reader sees all of it or none.

        Raises:
            ObjectExistsError: ``if_absent`` and the key is taken; exactly one of several
                concurrent creators succeeds.
        """
        ...

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
        """Return ``length`` bytes from ``start`` (to the end when None); short past the end.

        With ``into`` (contiguous): fill it instead and return the number of bytes, fewer past
        the end. What it holds after an error is undefined.

        Raises:
            ObjectMissingError: No such object.
        """
        ...

    def size(self, key: str) -> int | None:
        """Return the object's bytes, or None when there is none."""
        ...

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (key, bytes) of every object whose key starts with ``prefix``, sorted by key.

        For people, garbage collection and forensics: nothing is decided by listing.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove the object; one that is not there is no error."""
        ...
