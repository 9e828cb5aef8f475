# SPDX-License-Identifier: Apache-2.0
"""What a writer that was killed in the middle leaves on some stores, beside objects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """A write that has begun and not ended.

    Fields:
        key: The object it is for, or as much of it as is known: a temporary file of a local
            directory knows its folder only, ending in ``/``.
        upload_id: Names it to the store.
        started_unix_s: When it last showed life, by the store's clock.
    """

    key: str
    upload_id: str
    started_unix_s: float


@runtime_checkable
class StaleUploads(Protocol):
    """A store on which unfinished writes stay behind: multipart uploads, temporary files."""

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        """Yield the writes under way or left over below ``prefix``, a live writer's among them.

        Raises:
            StorageError: The store failed.
        """
        ...

    def abort_upload(self, upload: Upload) -> None:
        """Remove what it left; one that is not there is no error, and its writer's end is.

        Raises:
            StorageError: The store failed.
        """
        ...
