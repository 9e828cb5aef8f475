# SPDX-License-Identifier: Apache-2.0
"""The DeepSpeed configuration of a run, computed from its RunConfig; pure.

This module and its deepspeed_*.py neighbours are the only places where DeepSpeed's
keys are spelled. What is owned by a field of RunConfig cannot be set through zero.extra; what
is merely a good default here can.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from raydist.config.deepspeed_check import Problem, as_json, nest, walk
from raydist.config.deepspeed_keys import AUTO, NATIVE_AUTO
from raydist.config.run import RunConfig
from raydist.config.sections import ModelConfig
from raydist.errors import ConfigError
from raydist.world import BatchPlan

# DeepSpeed path -> the key of RunConfig that says it.
OWNERS: dict[str, str] = {
    "train_batch_size": "batch.global_batch_size",
    "train_micro_batch_size_per_gpu": "batch.micro_batch_size",
    "gradient_accumulation_steps": "batch.global_batch_size",
    "gradient_clipping": "optimizer.max_grad_norm",
    "optimizer": "optimizer",
    "scheduler": "optimizer.schedule",
    "bf16.enabled": "precision",
    "fp16": "precision",
    "torch_autocast": "precision",
    "data_types.param_dtype": "precision",
    "zero_optimization.stage": "strategy",
    "zero_optimization.offload_optimizer.device": "zero.offload_optimizer",
    "zero_optimization.offload_param.device": "zero.offload_parameters",
    "zero_optimization.cpu_offload": "zero.offload_optimizer",
    "zero_optimization.cpu_offload_param": "zero.offload_parameters",
    "zero_allow_untested_optimizer": "nothing: raydist hands DeepSpeed its own AdamW",
    "zero_force_ds_cpu_optimizer": "nothing: raydist hands DeepSpeed its own AdamW",
}

# DeepSpeed's own defaults, in elements, as upper bounds.
# Source: deepspeed 0.19.8, runtime/zero/config.py.
_MAX_REDUCE_BUCKET = 500_000_000
_MAX_PREFETCH = 50_000_000
_MAX_PERSISTENCE = 100_000
_MAX_LIVE = 1_000_000_000
_SUB_GROUP = 1_000_000_000

# A model smaller than this is reduced in one message; 33.5 MB in bf16.
_SMALLEST_BUCKET = 16_777_216

_NEVER_STEPS = 1_000_000_000


def render(config: RunConfig, batch: BatchPlan) -> dict[str, Any]:
    """Return the configuration that ``deepspeed.initialize`` is given.

    Args:
        config: A run with strategy zero3.
        batch: The batch as it is split over this run's world.

    Returns:
        Plain JSON types; nothing in it is ``"auto"``.

    Raises:
        ConfigError: The strategy is not zero3, or zero.extra sets what RunConfig owns, holds a
            key that DeepSpeed 0.19.8 does not have, or holds ``"auto"``.
    """
    if config.strategy != "zero3":
        raise ConfigError(
            problem=f"strategy={config.strategy} does not use DeepSpeed.",
            way_out="Set strategy to zero3.",
        )
    return nest(default_leaves(config) | extra_leaves(config) | _owned_leaves(config, batch))


def _owned_leaves(config: RunConfig, batch: BatchPlan) -> dict[str, Any]:
    leaves: dict[str, Any] = {
        "train_batch_size": batch.global_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "gradient_clipping": config.optimizer.max_grad_norm or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization.stage": 3,
    }
    if config.precision == "bf16":
        leaves["bf16.enabled"] = True
    if config.zero.offload_optimizer != "none":
        leaves["zero_optimization.offload_optimizer.device"] = config.zero.offload_optimizer
        leaves["zero_force_ds_cpu_optimizer"] = False
    if config.zero.offload_parameters != "none":
        leaves["zero_optimization.offload_param.device"] = config.zero.offload_parameters
    return leaves


def default_leaves(config: RunConfig) -> dict[str, Any]:
    """Return, by dotted path, what raydist chooses where zero.extra says nothing.

    Sizes are in elements. A reduce bucket holds one decoder block, so reduction overlaps with
    the backward of the next; no bucket is larger than the model. Host memory is pinned only
    where something is offloaded to it: copies then run beside the computation.

    Source: upper bounds as DeepSpeed's defaults; persistence threshold 10 x hidden_size as
    transformers' integrations/deepspeed.py fills it in for "auto".
    """
    block, total = _count_elements(config.model)
    section = "zero_optimization"
    bucket = min(_MAX_REDUCE_BUCKET, max(block, min(total, _SMALLEST_BUCKET)))
    persistence = min(_MAX_PERSISTENCE, 10 * config.model.hidden_size)
    leaves: dict[str, Any] = {
        "steps_per_print": _NEVER_STEPS,
        "wall_clock_breakdown": False,
        f"{section}.overlap_comm": True,
        f"{section}.contiguous_gradients": True,
        f"{section}.reduce_bucket_size": bucket,
        f"{section}.sub_group_size": _SUB_GROUP,
        f"{section}.stage3_prefetch_bucket_size": min(_MAX_PREFETCH, total),
        f"{section}.stage3_param_persistence_threshold": persistence,
        f"{section}.stage3_max_live_parameters": _MAX_LIVE,
        f"{section}.stage3_max_reuse_distance": _MAX_LIVE,
        f"{section}.stage3_gather_16bit_weights_on_model_save": False,
    }
    if config.zero.offload_optimizer != "none":
        leaves[f"{section}.offload_optimizer.pin_memory"] = True
    if config.zero.offload_parameters != "none":
        leaves[f"{section}.offload_param.pin_memory"] = True
    return leaves


def _count_elements(model: ModelConfig) -> tuple[int, int]:
    """Return the elements of one decoder block's matrices and about those of the model.

    ``raydist.plan.parameters`` counts exactly; this layer lies below it and needs a bound only.
    """
    hidden = model.hidden_size
    key_value = hidden // model.num_attention_heads * model.num_key_value_heads
    block = hidden * (2 * hidden + 2 * key_value + 3 * model.intermediate_size)
    embeddings = (1 if model.tie_embeddings else 2) * model.vocab_size * hidden
    return block, block * model.num_layers + embeddings


def extra_leaves(config: RunConfig) -> dict[str, Any]:
    """Return zero.extra by dotted path, checked.

    Raises:
        ConfigError: As ``render``.
    """
    walked = walk(copy.deepcopy(config.zero.extra))
    problems = list(walked.problems)
    for path, value in walked.leaves.items():
        owner = owner_of(path)
        if owner:
            problems.append(Problem(path, "raydist sets it", f"It follows from {owner}."))
        elif value == AUTO and path in NATIVE_AUTO:
            problems.append(Problem(path, '"auto" is its default', "Leave it out."))
        elif isinstance(value, str) and value == AUTO:
            problems.append(
                Problem(path, '"auto" cannot be resolved here', "Write the value, or leave it out.")
            )
    if problems:
        raise ConfigError(
            problem="zero.extra holds settings that cannot go to DeepSpeed:\n"
            + "\n".join(f"  - {problem}" for problem in problems),
            way_out=f"zero.extra={as_json(config.zero.extra)}",
        )
    return walked.leaves


def owner_of(path: str) -> str:
    """Return what decides a DeepSpeed path inside raydist, or "" where zero.extra may."""
    parts = path.split(".")
    prefixes = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
    return next((OWNERS[prefix] for prefix in prefixes if prefix in OWNERS), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroSizes:
    """The settings of ZeRO-3 that decide how much memory a rank needs.

    Fields:
        reduce_bucket, prefetch, persistence, max_reuse, sub_group: In elements.
        gradient_bytes: Bytes of one element of a kept gradient partition.
        communication_bytes: Bytes of one element while gradients are reduced.
    """

    reduce_bucket: int
    prefetch: int
    persistence: int
    max_reuse: int
    sub_group: int
    gradient_bytes: int
    communication_bytes: int


_DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


def zero_sizes(config: RunConfig) -> ZeroSizes:
    """Return the sizes that ``render`` hands DeepSpeed, zero.extra included.

    Gradient partitions have the dtype of the parameters unless data_types.grad_accum_dtype
    says otherwise.

    Raises:
        ConfigError: As ``render``.

    Source: deepspeed 0.19.8, engine.get_data_types and stage3.grad_partitions_flat_buffer.
    """
    leaves = default_leaves(config) | extra_leaves(config)
    section = "zero_optimization"
    own = config.precision
    return ZeroSizes(
        reduce_bucket=leaves[f"{section}.reduce_bucket_size"],
        prefetch=leaves[f"{section}.stage3_prefetch_bucket_size"],
        persistence=leaves[f"{section}.stage3_param_persistence_threshold"],
        max_reuse=leaves[f"{section}.stage3_max_reuse_distance"],
        sub_group=leaves[f"{section}.sub_group_size"],
        gradient_bytes=_DTYPE_BYTES.get(leaves.get("data_types.grad_accum_dtype", own), 4),
        communication_bytes=_DTYPE_BYTES.get(leaves.get("communication_data_type", own), 4),
    )
