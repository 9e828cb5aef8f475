# SPDX-License-Identifier: Apache-2.0
"""Bytes that one rank needs, by what they are for, on the device and in host memory.

States (parameters, gradients, master weights, moments) are exact. The rest is a model of the
largest moment of a step: it follows the tensors that torch, DeepSpeed and transformers hold,
with two assumptions, named below, that stand for what nobody can count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from raydist.config import ModelConfig, RunConfig
from raydist.config.deepspeed import zero_sizes
from raydist.plan.devices import DeviceSpec
from raydist.plan.parameters import block_shapes, parameter_shapes

Place = Literal["device", "host"]

# states: kept from step to step. always: also kept, but not model state. backward, step: held
# at the end of the forward and while the optimizer runs; the two never overlap.
Phase = Literal["states", "always", "backward", "step"]

# Assumption: what the CUDA context, its libraries and NCCL's channels take beside torch.
RUNTIME_BYTES = 3 * 2**29

# Assumption: part of the non-state bytes that the caching allocator cannot reuse.
FRAGMENTATION = 0.1

# master, exp_avg, exp_avg_sq, each fp32. Source: design.md section 5, data objects.
CHECKPOINT_BYTES_PER_PARAMETER = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPart:
    """One use of memory on one rank.

    Fields:
        kind: What it holds.
        place: Where it lies.
        phase: When it is held.
        size_bytes: Its size at its largest.
    """

    kind: str
    place: Place
    phase: Phase
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """What one rank holds, and what a checkpoint of the run weighs.

    Fields:
        strategy, world_size: How the state is spread, and over how many ranks.
        num_parameters: Trainable elements of the model.
        parts: Every use of memory, in the order of a report.
        checkpoint_bytes, checkpoint_bytes_per_rank: Tensor data of one checkpoint; the part
            that one rank writes.
    """

    strategy: str
    world_size: int
    num_parameters: int
    parts: tuple[MemoryPart, ...]
    checkpoint_bytes: int
    checkpoint_bytes_per_rank: int

    def total_bytes(self, place: Place, *phases: Phase) -> int:
        """Return the bytes held at one place in the given phases together."""
        return sum(p.size_bytes for p in self.parts if p.place == place and p.phase in phases)

    def state_bytes(self, place: Place = "device") -> int:
        """Return the bytes of model state, the textbook figure."""
        return self.total_bytes(place, "states")

    def peak_bytes(self, place: Place = "device") -> int:
        """Return the bytes at the largest moment of a step: the figure that has to fit."""
        kept = self.total_bytes(place, "states", "always")
        moments = (self.total_bytes(place, "backward"), self.total_bytes(place, "step"))
        return kept + max(moments)

    def fits(self, device: DeviceSpec) -> bool:
        """Whether the peak fits; a device of unknown size takes everything."""
        if device.memory_bytes is None:
            return True
        needed = self.peak_bytes("device")
        if device.is_host:
            needed += self.peak_bytes("host")
        return needed <= device.memory_bytes


def plan_memory(config: RunConfig, *, world_size: int, device: DeviceSpec) -> MemoryPlan:
    """Return what each rank of a run needs; the largest rank where they differ.

    Args:
        config: The run; its strategy, precision, batch and zero sections count.
        world_size: Data-parallel ranks, at least 1.
        device: What a rank drives.

    Raises:
        ConfigError: zero.extra cannot be handed to DeepSpeed.
    """
    numels = [math.prod(shape) for shape in parameter_shapes(config.model).values()]
    if config.strategy == "zero3":
        parts = _zero3_parts(config, numels, world_size, device)
    else:
        parts = _ddp_parts(config, numels, device)
    parts += _model_parts(config)
    for phase in ("backward", "step"):
        loose = sum(p.size_bytes for p in parts if p.place == "device" and p.phase == phase)
        parts.append(_part("fragmentation", int(loose * FRAGMENTATION), phase=phase))
    if not device.is_host:
        parts.append(_part("CUDA and NCCL", RUNTIME_BYTES, phase="always"))
    written = sum(-(-n // world_size) for n in numels) * CHECKPOINT_BYTES_PER_PARAMETER
    parts.append(_part("checkpoint snapshot", written, place="host", phase="always"))
    return MemoryPlan(
        strategy=config.strategy,
        world_size=world_size,
        num_parameters=sum(numels),
        parts=tuple(part for part in parts if part.size_bytes),
        checkpoint_bytes=sum(numels) * CHECKPOINT_BYTES_PER_PARAMETER,
        checkpoint_bytes_per_rank=written,
    )


def _part(
    kind: str, size_bytes: int, *, place: Place = "device", phase: Phase = "states"
) -> MemoryPart:
    return MemoryPart(kind=kind, place=place, phase=phase, size_bytes=size_bytes)


def _ddp_parts(config: RunConfig, numels: list[int], device: DeviceSpec) -> list[MemoryPart]:
    """Replicated fp32 weights, gradients and moments; bf16 through autocast.

    Gradients lie in the reduction buckets (gradient_as_bucket_view), so they count once. Under
    autocast each matrix has a bf16 copy from its first use to its backward.

    Source: torch DistributedDataParallel, gradient_as_bucket_view; performance.md A4 (16 P).
    """
    total = sum(numels)
    copies = 2 * _count_matrix_elements(config.model)
    transient = 8 * max(numels) if device.is_host else 4 * total
    return [
        _part("parameters", 4 * total),
        _part("gradients", 4 * total),
        _part("optimizer moments", 8 * total),
        _part("bf16 weight copies", copies if config.precision == "bf16" else 0, phase="backward"),
        _part("optimizer temporaries", transient, phase="step"),
    ]


def _zero3_parts(
    config: RunConfig, numels: list[int], world_size: int, device: DeviceSpec
) -> list[MemoryPart]:
    """Partitions of everything, and the whole of what is being computed with.

    Each tensor is cut into world_size equal parts, the last padded. A partition has parameters
    in the precision of the run, gradients as zero_sizes says, and in fp32 master weights and
    two moments; a run in fp32 has master weights too (DeepSpeed means to share them, but
    compares a torch.device with a str; measured). The optimizer sees one sub-group at a time,
    with an fp32 copy of its gradients. Offloading the optimizer moves gradients, master weights
    and moments to the host, where the fp32 gradients stay.

    Gathered at once: what is reused within max_reuse elements stays, which around the turn from
    forward to backward is half of that; one tensor more; and the prefetch. Never more than the
    model.

    Source: deepspeed 0.19.8, stage3.py (_create_fp32_partitions, initialize_optimizer_states,
    _prepare_fp32_grad_for_sub_group), partitioned_param_coordinator.__params_to_release.
    """
    sizes = zero_sizes(config)
    element = 2 if config.precision == "bf16" else 4
    own = sum(-(-n // world_size) for n in numels)
    largest = max(numels)
    is_offloaded = config.zero.offload_optimizer != "none"
    optimizer: Place = "host" if is_offloaded else "device"
    parameters: Place = "host" if config.zero.offload_parameters != "none" else "device"
    gathered = min(sum(numels), sizes.max_reuse // 2 + largest + sizes.prefetch)
    persistent = sum(n for n in numels if n <= sizes.persistence)
    bucket = sizes.reduce_bucket + max(sizes.reduce_bucket, largest)
    sub_group = min(own, sizes.sub_group + -(-largest // world_size))
    # torch's AdamW: foreach makes one temporary on a device, the loop on a host two.
    temporary = 8 if is_offloaded or device.is_host else 4
    copied = 4 + (sizes.gradient_bytes if sizes.gradient_bytes < 4 else 0)
    return [
        _part("parameters", element * own, place=parameters),
        _part("gradients", sizes.gradient_bytes * own, place=optimizer),
        _part("fp32 gradients", 4 * own if is_offloaded else 0, place=optimizer),
        _part("master weights", 4 * own, place=optimizer),
        _part("optimizer moments", 8 * own, place=optimizer),
        _part("gathered parameters", element * max(gathered, persistent), phase="backward"),
        _part("gradient buckets", sizes.communication_bytes * bucket, phase="backward"),
        _part("gradient being formed", element * largest, phase="backward"),
        _part(
            "optimizer temporaries",
            (temporary + (0 if is_offloaded else copied)) * sub_group,
            place=optimizer,
            phase="step",
        ),
    ]


def _model_parts(config: RunConfig) -> list[MemoryPart]:
    tokens = config.batch.micro_batch_size * config.data.sequence_length
    block = activation_bytes_per_block(config, tokens=tokens)
    kept = block * config.model.num_layers
    if config.activation_checkpointing:
        # Each block keeps its input only; one block at a time is computed again.
        width = 2 if config.precision == "bf16" and config.strategy != "ddp" else 4
        kept = width * tokens * config.model.hidden_size * config.model.num_layers + block
    # One block more: the gradients of a block's activations while its backward runs.
    return [
        _part("activations", kept, phase="backward"),
        _part("activation gradients", block, phase="backward"),
        _part("logits", logits_bytes(config, tokens=tokens), phase="backward"),
    ]


def activation_bytes_per_block(config: RunConfig, *, tokens: int) -> int:
    """Return what one decoder block keeps for its backward, without activation checkpointing.

    With h = hidden, k = width of keys and of values, f = intermediate, a = heads, per token:

        bf16       20 h + 4 k +  8 f + 4 a + 8
        fp32       32 h + 8 k + 16 f + 4 a + 8
        autocast   30 h + 4 k +  8 f + 4 a + 8

    In bf16, each of the two norms keeps its input in fp32, its normalised value and its output
    (8 h), attention keeps q, k, v and its output (4 h + 4 k) and the log of its row sums (4 a),
    and the gated MLP keeps gate, up, silu(gate) and their product (8 f). Attention scores are
    never stored: scaled_dot_product_attention recomputes them.

    Source: Korthikanti et al., arXiv 2205.05198, section 4.1, redone for RMSNorm, grouped
    keys, a gated MLP, no dropout and fused attention; equal to the bytes that autograd saves
    in transformers 5.24 (tests/unit/plan/test_plan_memory.py).
    """
    model = config.model
    width = block_shapes(model)["self_attn.k_proj.weight"][0]
    inputs, keys, inner = 20, 4, 8
    if config.precision == "fp32":
        inputs, keys, inner = 32, 8, 16
    elif config.strategy == "ddp":
        inputs = 30
    per_token = inputs * model.hidden_size + keys * width + inner * model.intermediate_size
    return tokens * (per_token + 4 * model.num_attention_heads + 8)


def _count_matrix_elements(model: ModelConfig) -> int:
    """Return the elements of the weights that are multiplied with, the output's included."""
    block = sum(math.prod(shape) for shape in block_shapes(model).values() if len(shape) == 2)
    return block * model.num_layers + model.vocab_size * model.hidden_size


def logits_bytes(config: RunConfig, *, tokens: int) -> int:
    """Return what the loss holds at its largest: three tensors of tokens x vocabulary.

    The logits in the arithmetic of the run, and two of fp32: in the forward the logits in fp32
    and their log-softmax, in the backward the log-softmax and its gradient.

    Source: transformers 5.24, loss/loss_utils.py (logits.float(), cross_entropy).
    """
    logits = 2 if config.precision == "bf16" else 4
    return tokens * config.model.vocab_size * (logits + 8)
