# SPDX-License-Identifier: Apache-2.0
"""JSON records that prove themselves: a CRC32C of the rest stands in each of them."""

from __future__ import annotations

import json
import re
from typing import Any

from awscrt import checksums

_FIELD = "crc32c"
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_END = re.compile(rb',"crc32c":(\d+)\}$')


def seal(record: dict[str, Any]) -> bytes:
    """Return ``record`` as compact JSON with its checksum as the last field."""
    rest = _dump(record)
    comma = b"," if record else b""
    return rest[:-1] + comma + f'"{_FIELD}":{checksums.crc32c(rest)}}}'.encode()


def unseal(raw: bytes) -> dict[str, Any]:
    """Return the record without its checksum.

    Raises:
        ValueError: Not JSON, not a record, or altered since it was sealed.
    """
    record = json.loads(raw)
    if not isinstance(record, dict) or _FIELD not in record:
        raise ValueError("it is no sealed record")
    stated = record.pop(_FIELD)
    end = _END.search(raw, max(0, len(raw) - 32))
    if end is not None and checksums.crc32c(raw[: end.start()] + b"}") == stated == int(end[1]):
        return record
    if stated != checksums.crc32c(_dump(record)):  # of JSON that was laid out anew
        raise ValueError("it does not match its own checksum")
    return record


def _dump(record: dict[str, Any]) -> bytes:
    return _ENCODER.encode(record).encode()
