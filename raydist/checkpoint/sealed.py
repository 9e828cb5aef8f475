# SPDX-License-Identifier: Apache-2.0
"""JSON records that prove themselves: a CRC32C of the rest stands in each of them."""

from __future__ import annotations

import json
from typing import Any

from awscrt import checksums

_FIELD = "crc32c"


def seal(record: dict[str, Any]) -> bytes:
    """Return ``record`` as compact JSON with its checksum as the last field."""
    return _dump({**record, _FIELD: _checksum(record)})


def unseal(raw: bytes) -> dict[str, Any]:
    """Return the record without its checksum.

    Raises:
        ValueError: Not JSON, not a record, or altered since it was sealed.
    """
    record = json.loads(raw)
    if not isinstance(record, dict) or _FIELD not in record:
        raise ValueError("it is no sealed record")
    stated = record.pop(_FIELD)
    if stated != _checksum(record):
        raise ValueError("it does not match its own checksum")
    return record


def _checksum(record: dict[str, Any]) -> int:
    return checksums.crc32c(_dump(record))


def _dump(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode()
