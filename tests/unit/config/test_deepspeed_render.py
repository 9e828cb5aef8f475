# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's JSON, out. Real: DeepSpeed's own config class. Faked: its world size."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest

pytest.importorskip("deepspeed")

from deepspeed.runtime import config as ds_config_module
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed_documents import (
    accepted_by_deepspeed,
    rendered,
    run_config,
)

from raydist.config import (
    ModelConfig,
    OptimizerConfig,
    ZeroConfig,
)
from raydist.config import deepspeed_keys as keys
from raydist.config.deepspeed import zero_sizes
from raydist.errors import ConfigError
from raydist.plan.parameters import block_shapes, count_parameters


def test_render_bf16_is_what_deepspeed_parses() -> None:
    parsed = accepted_by_deepspeed(rendered(run_config()), 4)
    assert parsed.train_batch_size == 64
    assert parsed.train_micro_batch_size_per_gpu == 2
    assert parsed.gradient_accumulation_steps == 8
    assert parsed.bfloat16_config.enabled is True
    assert parsed.float16_config.enabled is False
    assert parsed.gradient_clipping == 1.0
    assert parsed.zero_optimization_stage == 3
    assert parsed.zero_config.overlap_comm is True
    assert parsed.zero_config.gather_16bit_weights_on_model_save is False
    assert parsed.zero_allow_untested_optimizer is True
    assert parsed.wall_clock_breakdown is False


def test_render_fp32_has_no_precision_section() -> None:
    tree = rendered(run_config(precision="fp32"))
    assert "bf16" not in tree
    assert "fp16" not in tree
    assert accepted_by_deepspeed(tree, 4).bfloat16_config.enabled is False


def test_render_without_clipping_is_zero() -> None:
    optimizer = OptimizerConfig(learning_rate=1e-3, max_grad_norm=None)
    parsed = accepted_by_deepspeed(rendered(run_config(optimizer=optimizer)), 4)
    assert parsed.gradient_clipping == 0.0


def test_render_offload_pins_only_what_is_offloaded() -> None:
    zero = ZeroConfig(offload_optimizer="cpu")
    tree = rendered(run_config(zero=zero))
    assert tree["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert "offload_param" not in tree["zero_optimization"]
    parsed = accepted_by_deepspeed(tree, 4)
    assert parsed.zero_config.model_dump()["offload_optimizer"]["device"] == "cpu"
    assert parsed.zero_force_ds_cpu_optimizer is False


def test_render_buckets_of_a_small_model_are_no_larger_than_the_model() -> None:
    config = run_config()
    total = count_parameters(config.model)
    sizes = zero_sizes(config)
    assert sizes.reduce_bucket <= total
    assert sizes.prefetch <= total


def test_render_bucket_of_a_large_model_holds_one_block() -> None:
    model = ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    matrices = [shape for shape in block_shapes(model).values() if len(shape) == 2]
    expected = sum(rows * columns for rows, columns in matrices)
    assert zero_sizes(run_config(model=model)).reduce_bucket == expected == 218_103_808


def test_render_extra_is_merged_and_overrides_defaults() -> None:
    extra = {
        "zero_optimization": {"sub_group_size": 5e7, "overlap_comm": False},
        "comms_logger": {"enabled": True},
        "wall_clock_breakdown": True,
    }
    tree = rendered(run_config(zero=ZeroConfig(extra=extra)))
    assert tree["zero_optimization"]["sub_group_size"] == 50_000_000
    assert tree["zero_optimization"]["overlap_comm"] is False
    assert tree["zero_optimization"]["stage"] == 3
    assert tree["wall_clock_breakdown"] is True
    accepted_by_deepspeed(tree, 4)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"train_batch_size": 8}, "batch.global_batch_size"),
        ({"gradient_clipping": 0.5}, "optimizer.max_grad_norm"),
        ({"bf16": {"enabled": False}}, "precision"),
        ({"fp16": {"loss_scale": 0}}, "precision"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer.type"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "zero.offload_parameters"),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "reduce_bucket_size"),
        ({"data_types": {"keep_in_fp32_modules": "auto"}}, "Leave it out"),
        ({"elasticity": {"enabled": True}}, "removed"),
        ({"zero_optimization": {"sub_group_sise": 1}}, "sub_group_size"),
    ],
)
def test_render_extra_that_raydist_owns_or_deepspeed_refuses(
    extra: dict[str, Any], named: str
) -> None:
    config = run_config(zero=ZeroConfig(extra=extra))
    with pytest.raises(ConfigError, match=r"zero\.extra") as caught:
        rendered(config)
    assert named in str(caught.value)


def test_render_needs_zero3() -> None:
    with pytest.raises(ConfigError, match="strategy=ddp"):
        rendered(run_config(strategy="ddp"))


def test_gradient_dtype_follows_precision_and_extra() -> None:
    assert zero_sizes(run_config()).gradient_bytes == 2
    assert zero_sizes(run_config(precision="fp32")).gradient_bytes == 4
    zero = ZeroConfig(extra={"data_types": {"grad_accum_dtype": "fp32"}})
    assert zero_sizes(run_config(zero=zero)).gradient_bytes == 4


# --- the table of keys against DeepSpeed's own models --------------------------------------


def model_keys(model: Any) -> set[str]:
    """Names that a pydantic model takes, in the spelling that raydist writes."""
    return {f.alias or name for name, f in model.model_fields.items()}


def test_zero_keys_are_those_of_deepspeed() -> None:
    section = keys.KNOWN["zero_optimization"]
    ours = set(section) | {
        alias.removeprefix("zero_optimization.")
        for alias in keys.ALIASES
        if alias.startswith("zero_optimization.")
    }
    theirs = model_keys(DeepSpeedZeroConfig) | set(DeepSpeedZeroConfig.model_fields)
    assert ours == theirs


@pytest.mark.parametrize(
    ("path", "module", "name"),
    [
        ("bf16", "deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
        ("fp16", "deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
        ("compile", "deepspeed.compile.config", "CompileConfig"),
        ("comms_logger", "deepspeed.comm.config", "CommsLoggerConfig"),
        ("tensorboard", "deepspeed.monitor.config", "TensorBoardConfig"),
        ("csv_monitor", "deepspeed.monitor.config", "CSVConfig"),
        ("wandb", "deepspeed.monitor.config", "WandbConfig"),
        ("comet", "deepspeed.monitor.config", "CometConfig"),
        (
            "zero_optimization.offload_param",
            "deepspeed.runtime.zero.offload_config",
            "DeepSpeedZeroOffloadParamConfig",
        ),
        (
            "zero_optimization.offload_optimizer",
            "deepspeed.runtime.zero.offload_config",
            "DeepSpeedZeroOffloadOptimizerConfig",
        ),
        (
            "zero_optimization.zenflow",
            "deepspeed.runtime.zenflow.zenflow_config",
            "ZenFlowConfig",
        ),
    ],
)
def test_section_keys_are_those_of_deepspeed(path: str, module: str, name: str) -> None:
    model = getattr(__import__(module, fromlist=[name]), name)
    section = keys.KNOWN
    for part in path.split("."):
        section = section[part]
    assert set(section) == model_keys(model)


def test_removed_keys_are_those_of_deepspeed() -> None:
    theirs = set(ds_config_module._REMOVED_TOP_LEVEL_CONFIG_KEYS) | {
        f"zero_optimization.{key}" for key in ds_config_module._REMOVED_ZERO_CONFIG_KEYS
    }
    assert set(keys.REMOVED) == theirs
