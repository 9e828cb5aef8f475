# SPDX-License-Identifier: Apache-2.0
"""Between the floating-point formats of weights, on bytes, with numpy alone."""

from __future__ import annotations

from typing import Any

import numpy as np

FLOATS = ("F32", "BF16", "F16", "F64")
"""safetensors names of the formats that weights may have."""

_NUMPY = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}


def to_float32(raw: bytes | memoryview, dtype: str) -> np.ndarray[Any, Any]:
    """Return the values of ``raw``, elements of ``dtype``, as fp32.

    fp64 is rounded to nearest; the others are exact.
    """
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    with np.errstate(over="ignore"):  # the caller looks for what is not finite
        return np.frombuffer(raw, _NUMPY[dtype]).astype("<f4", copy=False)


def from_float32(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Return the bytes of finite fp32 ``values`` as ``dtype``, rounded to nearest, ties to even.

    Values beyond the format's range become infinite.
    """
    if dtype == "BF16":
        bits = values.view("<u4")
        odd = (bits >> 16) & 1
        return ((bits + (0x7FFF + odd)) >> 16).astype("<u2").view(np.uint8)
    with np.errstate(over="ignore"):
        return values.astype(_NUMPY[dtype], copy=False).view(np.uint8)


def largest_finite(dtype: str) -> float:
    """Return the largest fp32 value that does not round to infinity in ``dtype``."""
    # One below half a unit in the last place above the format's largest value.
    bits = {"F32": 0x7F7FFFFF, "BF16": 0x7F7F7FFF, "F16": 0x477FEFFF}[dtype]
    return float(np.array(bits, "<u4").view("<f4"))
