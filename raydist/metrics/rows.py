# SPDX-License-Identifier: Apache-2.0
"""The form of a metrics row: one line of valid JSON, under a key of its attempt.

A row is keyed by ``attempt`` and ``step``. What raydist reads back where present: ``loss``,
``grad_norm``, ``tokens_per_s``, ``tokens`` (of this step), ``tokens_seen`` (since step 1) and
``skipped`` (true where the optimizer left the weights alone).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

METRICS_PREFIX = "metrics/attempt-"
_SEGMENT = re.compile(re.escape(METRICS_PREFIX) + r"(\d{4,})(?:\.(\d{4,}))?\.jsonl")


def attempt_key(attempt: int) -> str:
    """Return the key of the first segment of an attempt's rows."""
    return f"{METRICS_PREFIX}{attempt:04d}.jsonl"


def segment_key(first_key: str, index: int) -> str:
    """Return the key of segment ``index``; segment 0 has ``first_key`` itself."""
    stem = first_key.removesuffix(".jsonl")
    return first_key if index == 0 else f"{stem}.{index:04d}.jsonl"


def parse_segment_key(key: str) -> tuple[int, int] | None:
    """Return (attempt, segment index), or None for a key that holds no rows."""
    match = _SEGMENT.fullmatch(key)
    return (int(match[1]), int(match[2] or 0)) if match else None


def encode_row(row: Mapping[str, object]) -> bytes:
    """Return the row as one line of JSON, newline included.

    JSON has no NaN: a non-finite float becomes null, and what it was goes to a field beside it
    (``"loss": null, "loss_nonfinite": "nan"``; inside a list or dict, ``"x.0_nonfinite"``).

    Raises:
        ValueError: ``attempt`` or ``step`` is missing or no int.
        TypeError: A value is no JSON type.
    """
    for name in ("attempt", "step"):
        if not isinstance(row.get(name), int):
            raise ValueError(f"metrics row has {name}={row.get(name)!r}; an int keys the row")
    nonfinite: dict[str, str] = {}
    values = {name: _finite(value, name, nonfinite) for name, value in row.items()}
    return json.dumps(values | nonfinite, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _finite(value: object, name: str, nonfinite: dict[str, str]) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite[f"{name}_nonfinite"] = str(float(value))
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item, f"{name}.{key}", nonfinite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item, f"{name}.{i}", nonfinite) for i, item in enumerate(value)]
    return value


def decode_row(line: bytes) -> dict[str, Any] | None:
    """Return the row of one line, or None where the line is no whole row."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    is_keyed = isinstance(row.get("attempt"), int) and isinstance(row.get("step"), int)
    return row if is_keyed else None


def is_skipped(row: Mapping[str, Any]) -> bool:
    """Tell whether the step left the weights alone, its loss or gradient not being finite."""
    return bool(row.get("skipped")) or "loss_nonfinite" in row or "grad_norm_nonfinite" in row


def is_number(row: Mapping[str, Any], name: str) -> bool:
    """Tell whether the row has a finite number under ``name``."""
    value = row.get(name)
    return isinstance(value, (int, float)) and math.isfinite(value)
