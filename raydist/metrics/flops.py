# SPDX-License-Identifier: Apache-2.0
"""Model FLOPs of training and the share of the hardware's peak they reach (MFU)."""

from __future__ import annotations

import re

from raydist.config import ModelConfig

# Dense bf16 tensor-core FLOP/s with fp32 accumulation, by the words that the device's name must
# hold; the first match wins, so a variant stands before its family. Vendors print the figure
# "with sparsity" first: where only that one is given, it is halved here.
_PEAK_FLOPS_PER_S: tuple[tuple[frozenset[str], float], ...] = tuple(
    (frozenset(words.split()), peak)
    for words, peak in (
        # NVIDIA Blackwell datasheet: HGX B200 36 PFLOPS sparse over 8 GPUs; GB200 5 PFLOPS sparse.
        ("GB200", 2500e12),
        ("B200", 2250e12),
        # NVIDIA GH200 datasheet: 1,979 TFLOPS sparse.
        ("GH200", 989e12),
        # nvidia.com/en-us/data-center/h200: NVL 1,671, SXM 1,979 TFLOPS sparse.
        ("H200 NVL", 835e12),
        ("H200", 989e12),
        # nvidia.com/en-us/data-center/h100 and the H100 datasheet: NVL 1,671, PCIe 1,513,
        # SXM 1,979 TFLOPS sparse. The first PCIe boards are named by their HBM2e alone.
        ("H100 NVL", 835e12),
        ("H100 PCIE", 756e12),
        ("H100 HBM2E", 756e12),
        ("H100", 989e12),
        # H800: H100 with slower NVLink and FP64, the same tensor rate (Lenovo LP1814).
        ("H800 PCIE", 756e12),
        ("H800", 989e12),
        # NVIDIA A100 datasheet: 312 TFLOPS, SXM and PCIe alike; A800 differs in NVLink only.
        ("A100", 312e12),
        ("A800", 312e12),
        # NVIDIA A30 datasheet: 165 TFLOPS. A40 datasheet: 149.7 TFLOPS.
        ("A30", 165e12),
        ("A40", 149.7e12),
        # NVIDIA A10 datasheet: 125 TFLOPS. AWS A10G datasheet: 70 TFLOPS.
        ("A10", 125e12),
        ("A10G", 70e12),
        # NVIDIA L4 datasheet: 242 TFLOPS sparse. L40: 181 TFLOPS. L40S: 362 TFLOPS.
        ("L4", 121e12),
        ("L40", 181e12),
        ("L40S", 362e12),
        # NVIDIA Ada GPU architecture whitepaper, appendices A and B: FP32 accumulate.
        ("RTX 4090", 165.2e12),
        ("RTX 6000 ADA", 364.2e12),
        # NVIDIA Ampere GA102 whitepaper, appendix A: FP32 accumulate.
        ("RTX 3090", 71e12),
        ("RTX A6000", 154.8e12),
    )
)

# A slice of a GPU, or a chip that shares its name with a larger one: no peak rather than a wrong
# one ("NVIDIA GeForce RTX 4090 Laptop GPU", "... RTX 4090 D", "NVIDIA H100 80GB HBM3 MIG 1g.10gb").
_OTHER_CHIP_WORDS = frozenset({"MIG", "GRID", "LAPTOP", "D", "TI"})


def num_active_parameters(model: ModelConfig) -> int:
    """Count the parameters that take part in the arithmetic of one token.

    All of them (projections, MLP, norms, biases, output projection) except the table that ids
    are looked up in, which costs no multiplication. A tied table is counted, once: it is the
    output projection. The model is dense, so every counted parameter is active.
    """
    head_dim = model.hidden_size // model.num_attention_heads
    kv_size = head_dim * model.num_key_value_heads
    attention = 2 * model.hidden_size * (model.hidden_size + kv_size)
    if model.architecture == "qwen2":
        attention += model.hidden_size + 2 * kv_size
    mlp = 3 * model.hidden_size * model.intermediate_size
    norms = 2 * model.hidden_size
    output_projection = model.vocab_size * model.hidden_size
    return model.num_layers * (attention + mlp + norms) + model.hidden_size + output_projection


def flops_per_token(model: ModelConfig, *, sequence_length: int) -> int:
    """Return the model FLOPs of training on one token: forward and backward, no recomputation.

    6 N for the weights (2 forward, 4 backward) with N of ``num_active_parameters``, and
    12 L H S for the two attention products over the whole sequence: causal masking is not
    deducted, so that figures compare with published ones.

    Source: PaLM, arXiv 2204.02311, appendix B, 6 N + 12 L H Q T with H heads of size Q and T
    positions; here heads times head size is ``hidden_size``.
    """
    attention = 12 * model.num_layers * model.hidden_size * sequence_length
    return 6 * num_active_parameters(model) + attention


def peak_flops_per_s(device_name: str) -> float | None:
    """Return a device's dense bf16 peak, or None for a CPU or a device that is not known.

    Args:
        device_name: As ``torch.cuda.get_device_name`` gives it ("NVIDIA H100 80GB HBM3").
    """
    words = frozenset(re.split(r"[\s-]+", device_name.upper()))
    if words & _OTHER_CHIP_WORDS:
        return None
    return next((peak for needed, peak in _PEAK_FLOPS_PER_S if needed <= words), None)


def mfu(
    tokens_per_s: float, flops_per_token: float, peak: float | None, num_devices: int
) -> float | None:
    """Return model FLOPs utilization as a part of 1, or None where the peak is not known.

    Args:
        tokens_per_s: Tokens trained per second by all devices together.
        flops_per_token: As the function of that name returns.
        peak: Peak FLOP/s of one device.
        num_devices: Devices that share the work.
    """
    if peak is None:
        return None
    return tokens_per_s * flops_per_token / (peak * num_devices)
