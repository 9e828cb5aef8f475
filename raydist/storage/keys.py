# SPDX-License-Identifier: Apache-2.0
"""What a key may look like, the same for every store."""

from __future__ import annotations

from raydist.errors import ConfigError

TEMPORARY_PREFIX = ".tmp-"
"""Starts the file name of a local object that is still being written; no key part may."""


def check_key(key: str) -> None:
    """Refuse a key that could leave the root or mean different objects in different stores.

    Raises:
        ConfigError: The key is empty or absolute, or one of its parts is empty, ``.``, ``..``,
            reserved for temporary files, or holds a NUL character.
    """
    if not key:
        raise ConfigError(problem="An object key is empty.", way_out=_RULE)
    for part in key.split("/"):
        if part in ("", ".", "..") or part.startswith(TEMPORARY_PREFIX) or "\0" in part:
            raise ConfigError(problem=f"Object key {key!r} has the part {part!r}.", way_out=_RULE)


def check_prefix(prefix: str) -> None:
    """Refuse a listing prefix that no key could start with.

    Raises:
        ConfigError: The prefix is absolute, or a part before its last ``/`` is refused in keys.
    """
    folder, slash, _ = prefix.rpartition("/")
    if slash:
        check_key(folder)


def check_range(start: int, length: int | None) -> None:
    """Refuse a byte range that runs backwards.

    Raises:
        ConfigError: ``start`` or ``length`` is negative.
    """
    if start < 0 or (length is not None and length < 0):
        raise ConfigError(
            problem=f"A read asks for length={length} bytes from start={start}.",
            way_out="Both count forward from 0.",
        )


_RULE = (
    "A key is relative, its parts separated by single '/', none of them '.' or '..' "
    f"or starting with '{TEMPORARY_PREFIX}'."
)
