# SPDX-License-Identifier: Apache-2.0
"""Whether every number of a range is finite, on its bytes alone: no torch, little memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHUNK_ELEMENTS = 1 << 20
_FLOATS = {"F32": np.float32, "F64": np.float64}
_EXPONENT_BITS = {"BF16": 0x7F80, "F16": 0x7C00}  # all set: infinite or NaN (IEEE 754)


def find_nonfinite(data: memoryview, dtype: str) -> int | None:
    """Return the index of the first infinite or NaN element, None when there is none.

    Args:
        data: Bytes of the elements, little-endian.
        dtype: safetensors name; integers are finite.
    """
    if dtype in _FLOATS:
        return _first(np.frombuffer(data, _FLOATS[dtype]), _nonfinite_floats)
    if dtype in _EXPONENT_BITS:
        exponent = np.uint16(_EXPONENT_BITS[dtype])
        return _first(np.frombuffer(data, np.uint16), lambda bits: (bits & exponent) == exponent)
    return None


def _first(
    numbers: NDArray[Any], mark: Callable[[NDArray[Any]], NDArray[np.bool_] | None]
) -> int | None:
    for at in range(0, len(numbers), _CHUNK_ELEMENTS):
        marks = mark(numbers[at : at + _CHUNK_ELEMENTS])
        if marks is not None and marks.any():
            return at + int(marks.argmax())
    return None


def _nonfinite_floats(chunk: NDArray[Any]) -> NDArray[np.bool_] | None:
    # A sum is at memory speed, and not finite where an element is not. Finite elements may
    # overflow it too, which the second look tells apart.
    with np.errstate(over="ignore", invalid="ignore"):
        return None if np.isfinite(chunk.sum()) else ~np.isfinite(chunk)
