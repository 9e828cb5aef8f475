# SPDX-License-Identifier: Apache-2.0
"""What the filesystem refused, as a sentence with a way out."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from raydist.errors import StorageError


@contextlib.contextmanager
def explained(action: str, path: str) -> Iterator[None]:
    """Turn what the system refuses into a StorageError that names the path and the reason.

    Args:
        action: What is tried, such as ``write``.
        path: The file or directory it is about.

    Raises:
        StorageError: An OSError came out of the block.
    """
    try:
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        raise StorageError(
            problem=f"Cannot {action} {path}: {error.strerror or error} ({name}).",
            way_out=_WAYS_OUT.get(name, "Repair the filesystem, or choose another --storage."),
        ) from error


_FULL = "Free space there, or choose another --storage."
_LINKS = "--storage needs a filesystem with hard links and permission to make them."
_BLOCKED = "A part of the path is a file; remove it or choose another --storage."
_WAYS_OUT = {
    "ENOSPC": _FULL,
    "EDQUOT": _FULL,
    "EACCES": "Make it writable for the user the job runs as, or choose another --storage.",
    "EPERM": _LINKS,
    "ENOTSUP": _LINKS,
    "EOPNOTSUPP": _LINKS,
    "EROFS": "The filesystem is mounted read-only; mount it writable or choose another --storage.",
    "ENOTDIR": _BLOCKED,
    "EEXIST": _BLOCKED,
    "EISDIR": "A folder has that name; remove it or choose another --storage.",
    "ENAMETOOLONG": "Shorten the run's name or --storage.",
}
