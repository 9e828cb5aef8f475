# SPDX-License-Identifier: Apache-2.0
"""JSON records that prove themselves: a CRC32C of the rest stands in each of them."""

from __future__ import annotations

import json
import re
from typing import Any

from awscrt import checksums

_FIELD = "crc32c"
_SEAL = re.compile(rb',?"crc32c":([0-9]+)\}')


def seal(record: dict[str, Any]) -> bytes:
    """Return ``record`` as compact JSON with its checksum as the last field."""
    raw = _dump(record)
    return raw[:-1] + f'{"," if record else ""}"{_FIELD}":{checksums.crc32c(raw)}}}'.encode()


def unseal(raw: bytes) -> dict[str, Any]:
    """Return the record without its checksum.

    Raises:
        ValueError: Not JSON, not a record, or altered since it was sealed.
    """
    record = json.loads(raw)
    if not isinstance(record, dict) or _FIELD not in record:
        raise ValueError("it is no sealed record")
    del record[_FIELD]
    if not _is_as_written(raw):
        raise ValueError("it does not match its own checksum")
    return record


def _is_as_written(raw: bytes) -> bool:
    """Whether these are the very bytes that ``seal`` made.

    Bytes, not values: another digit at the end of a number can be the same float.
    """
    found = _SEAL.search(raw, max(0, len(raw) - 32))
    if found is None or found.end() != len(raw):
        return False
    whole = checksums.crc32c(raw[: found.start()])
    return checksums.crc32c(b"}", whole) == int(found[1])


def _dump(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode()
