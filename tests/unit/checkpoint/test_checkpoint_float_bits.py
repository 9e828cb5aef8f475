# SPDX-License-Identifier: Apache-2.0
"""Conversions between float formats against torch's, bit for bit. Nothing is faked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raydist.checkpoint.float_bits import from_float32, largest_finite, to_float32

_TORCH = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
}


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def _finite_values() -> np.ndarray:
    """Random bit patterns, every exponent among them, and ties of both 16-bit formats."""
    random = np.random.default_rng(7).integers(0, 1 << 32, 400_000, dtype=np.uint64)
    high = np.arange(1 << 16, dtype=np.uint64) << 16
    bits = np.concatenate(
        [random, high, high | 0x8000, high | 0x7FFF, high | 0x8001, high | 0x1000]
    )
    values = bits.astype("<u4").view("<f4")
    return values[np.isfinite(values)]


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_from_float32_rounds_as_torch_does(dtype: str) -> None:
    values = _finite_values()
    expected = torch.from_numpy(values.copy()).to(_TORCH[dtype])
    assert from_float32(values, dtype).tobytes() == _bits(expected)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_to_float32_is_exact_for_every_16_bit_value(dtype: str) -> None:
    raw = np.arange(1 << 16, dtype="<u2")
    expected = torch.from_numpy(raw.view(np.int16).copy()).view(_TORCH[dtype]).float().numpy()
    found = to_float32(raw.tobytes(), dtype)
    np.testing.assert_array_equal(found, expected)  # NaN is equal to NaN here
    assert found.dtype == np.float32


@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_to_float32_of_wider_formats_is_torchs(dtype: str) -> None:
    values = torch.from_numpy(_finite_values().copy()).to(_TORCH[dtype]) * 1.000000123
    found = to_float32(_bits(values), dtype)
    assert found.tobytes() == _bits(values.float())


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_largest_finite_is_the_last_value_that_stays_finite(dtype: str) -> None:
    last = np.array([largest_finite(dtype)], "<f4")
    with np.errstate(over="ignore"):
        beyond = np.nextafter(last, np.float32(np.inf))
    assert np.isfinite(to_float32(from_float32(last, dtype), dtype)).all()
    assert np.isinf(to_float32(from_float32(beyond, dtype), dtype)).all()
