# SPDX-License-Identifier: Apache-2.0
"""Configurations for the tests of DeepSpeed's JSON, and DeepSpeed's own reading of one."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest

pytest.importorskip("deepspeed")

from deepspeed.runtime import config as ds_config_module
from deepspeed.runtime.config import DeepSpeedConfig

from raydist.config import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
)
from raydist.config.deepspeed import render
from raydist.config.deepspeed_import import DsConfigReport, read_ds_config
from raydist.errors import ConfigError
from raydist.world import plan_batch


def run_config(**changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "name": "tiny",
        "num_steps": 500,
        "model": ModelConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=176,
            num_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
        "batch": BatchConfig(global_batch_size=64, micro_batch_size=2),
        "optimizer": OptimizerConfig(learning_rate=3e-4, warmup_steps=7),
        "data": DataConfig(source="python-stdlib", sequence_length=128),
    }
    return RunConfig(**values | changes)


def accepted_by_deepspeed(tree: dict[str, Any], world_size: int) -> DeepSpeedConfig:
    """Parse as DeepSpeed does, with mpu standing for the world."""
    assert '"auto"' not in json.dumps(tree)
    mpu = SimpleNamespace(get_data_parallel_world_size=lambda: world_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ds_config_module.dist, "get_rank", lambda: 0)
        return DeepSpeedConfig(tree, mpu=mpu)


def rendered(config: RunConfig, world_size: int = 4) -> dict[str, Any]:
    batch = plan_batch(
        global_batch_size=config.batch.global_batch_size,
        micro_batch_size=config.batch.micro_batch_size,
        world_size=world_size,
    )
    return render(config, batch)


def read(tree: dict[str, Any], **base: Any) -> DsConfigReport:
    return read_ds_config(tree, run_config(**base))


def problems_of(tree: dict[str, Any], **base: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(tree, **base)
    return str(caught.value)


TUTORIAL = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 100},
    },
    "zero_optimization": {
        "stage": 3,
        "contiguous_gradients": True,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_prefetch_bucket_size": 1e7,
        "stage3_param_persistence_threshold": 1e5,
        "reduce_bucket_size": 1e7,
        "sub_group_size": 1e9,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu"},
    },
}
