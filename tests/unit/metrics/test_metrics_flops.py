# SPDX-License-Identifier: Apache-2.0
"""FLOPs against published parameter counts; peaks against the names that drivers report."""

from __future__ import annotations

import pytest

from raydist.config import ModelConfig
from raydist.metrics.flops import flops_per_token, mfu, num_active_parameters, peak_flops_per_s

LLAMA3_8B = ModelConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)
QWEN2_0_5B = ModelConfig(
    architecture="qwen2",
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    tie_embeddings=True,
)


def test_active_parameters_are_all_but_the_lookup_table() -> None:
    assert num_active_parameters(LLAMA3_8B) == 8_030_261_248 - 128_256 * 4096


def test_a_tied_table_is_counted_once_and_qwen2_biases_are_counted() -> None:
    assert num_active_parameters(QWEN2_0_5B) == 494_032_768


def test_flops_per_token_adds_attention_over_the_whole_sequence() -> None:
    assert flops_per_token(LLAMA3_8B, sequence_length=8192) == (
        6 * num_active_parameters(LLAMA3_8B) + 12 * 32 * 4096 * 8192
    )


@pytest.mark.parametrize(
    ("device_name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM2e", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H800", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA A800-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("GRID A100-10C", None),
        ("Tesla V100-SXM2-16GB", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_peak_is_found_by_the_name_the_driver_reports(device_name: str, peak: float | None) -> None:
    assert peak_flops_per_s(device_name) == peak


def test_mfu_divides_by_the_peak_of_all_devices() -> None:
    assert mfu(4000.0, 5e10, 1e14, 4) == pytest.approx(0.5)


def test_mfu_is_unknown_where_the_peak_is() -> None:
    assert mfu(4000.0, 5e10, peak_flops_per_s("cpu"), 4) is None
