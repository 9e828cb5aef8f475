# SPDX-License-Identifier: Apache-2.0
"""JSON records that prove themselves: a CRC32C of the rest stands in each of them."""

from __future__ import annotations

import json
import re
from typing import Any

from awscrt import checksums

_FIELD = "crc32c"
_END = re.compile(rb',?"crc32c":[0-9]+\}\Z')


def seal(record: dict[str, Any]) -> bytes:
    """Return ``record`` as compact JSON with its checksum as the last field."""
    raw = json.dumps(record, separators=(",", ":")).encode()
    return raw[:-1] + f'{"," if record else ""}"{_FIELD}":{checksums.crc32c(raw)}}}'.encode()


def unseal(raw: bytes) -> dict[str, Any]:
    """Return the record without its checksum.

    Raises:
        ValueError: Not JSON, not a record, or not byte for byte what was sealed.
    """
    record = json.loads(raw)
    end = _END.search(raw, max(0, len(raw) - 32))
    if not isinstance(record, dict) or end is None:
        raise ValueError("it is no sealed record")
    whole = checksums.crc32c(b"}", checksums.crc32c(raw[: end.start()]))
    if record.pop(_FIELD) != whole:
        raise ValueError("it does not match its own checksum")
    return record
