# SPDX-License-Identifier: Apache-2.0
"""What a writer that was killed in the middle leaves on some stores, beside objects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True, slots=True)
class StaleUpload:
    """A write that was begun and has not ended.

    Fields:
        key: The object it is for, or as much of it as is known: a temporary file of a local
            directory knows its folder only, ending in ``/``.
        upload_id: Names it to the store.
        age_s: Since it was begun or last showed life.
    """

    key: str
    upload_id: str
    age_s: float


@runtime_checkable
class StaleUploads(Protocol):
    """A store on which unfinished writes stay behind: multipart uploads, temporary files."""

    def stale_uploads(self, prefix: str, *, older_than_s: float) -> Iterable[StaleUpload]:
        """Return what was left below ``prefix`` that long ago; a live writer's is among it.

        Raises:
            StorageError: The store failed.
        """
        ...

    def abort_upload(self, upload: StaleUpload) -> None:
        """Remove what it left; one that is not there is no error. Its writer will fail.

        Raises:
            StorageError: The store failed.
        """
        ...
