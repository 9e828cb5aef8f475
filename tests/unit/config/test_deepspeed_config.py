# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's JSON, out and in. Real: DeepSpeed's own config class. Faked: its world size."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest

pytest.importorskip("deepspeed")

from deepspeed.runtime import config as ds_config_module
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from raydist.config import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScalingConfig,
    ZeroConfig,
)
from raydist.config import deepspeed_keys as keys
from raydist.config.deepspeed import render, zero_sizes
from raydist.config.deepspeed_import import DsConfigReport, check_world, read_ds_config
from raydist.errors import ConfigError
from raydist.plan.parameters import block_shapes, count_parameters
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


# --- out ---------------------------------------------------------------------------------


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


# --- in: what is taken ---------------------------------------------------------------------

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

AUTOMATIC = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def test_tutorial_file_is_mapped_passed_and_runs(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(TUTORIAL), encoding="utf-8")
    report = read_ds_config(path, run_config())
    config = report.config
    assert config.batch == BatchConfig(global_batch_size=32, micro_batch_size=4)
    assert config.precision == "bf16"
    assert config.strategy == "zero3"
    assert config.optimizer == replace(
        run_config().optimizer,
        learning_rate=1e-4,
        beta2=0.999,
        weight_decay=0.01,
        max_grad_norm=0.5,
        schedule="constant",
        warmup_steps=100,
    )
    assert config.zero.offload_optimizer == config.zero.offload_parameters == "cpu"
    assert config.zero.extra["zero_optimization"]["sub_group_size"] == 1_000_000_000
    assert "stage" not in config.zero.extra["zero_optimization"]
    assert report.expected_world_size == 4
    parsed = accepted_by_deepspeed(rendered(config), 4)
    assert parsed.train_batch_size == 32
    assert parsed.zero_config.prefetch_bucket_size == 10_000_000
    text = report.render()
    assert "~ train_batch_size = 32" in text
    assert "batch.global_batch_size: 64 -> 32" in text
    assert "+ zero_optimization.reduce_bucket_size = 10000000" in text
    assert "expects 4 ranks" in text


def test_automatic_file_leaves_no_auto_and_names_each() -> None:
    report = read(AUTOMATIC)
    own = run_config()
    assert report.config.batch == own.batch
    assert report.config.precision == own.precision
    assert report.config.optimizer == replace(
        own.optimizer, schedule="linear", min_learning_rate_ratio=0.0
    )
    assert "auto" not in json.dumps(report.config.zero.extra)
    accepted_by_deepspeed(rendered(report.config), 4)
    resolved = {entry.path: entry.value for entry in report.resolved}
    assert resolved["optimizer.params.lr"] == 3e-4
    assert resolved["scheduler.params.total_num_steps"] == 500
    assert resolved["zero_optimization.reduce_bucket_size"] == zero_sizes(own).reduce_bucket
    assert resolved["train_batch_size"] == 64
    assert resolved["bf16.enabled"] is True
    assert resolved["fp16.enabled"] is False


def paths_with_auto(tree: Any, prefix: str = "") -> set[str]:
    if isinstance(tree, dict):
        return set().union(*(paths_with_auto(v, f"{prefix}{k}.") for k, v in tree.items()))
    return {prefix.rstrip(".")} if tree == "auto" else set()


def test_every_auto_is_in_the_report() -> None:
    resolved = {entry.path for entry in read(AUTOMATIC).resolved}
    assert paths_with_auto(AUTOMATIC) <= resolved


def known_leaves(table: dict[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key, kind in table.items():
        if isinstance(kind, dict):
            found += known_leaves(kind, f"{prefix}{key}.")
        elif key != "*":
            found.append(prefix + key)
    return found


def tree_with_auto(path: str) -> dict[str, Any]:
    """Return a tree that is right but for one "auto"."""
    tree: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    node = tree
    *sections, last = path.split(".")
    for section in sections:
        node = node.setdefault(section, {})
    if sections[:1] == ["optimizer"]:
        tree["optimizer"]["type"] = "AdamW"
    if sections[:1] == ["scheduler"]:
        is_cosine = last in ("cos_min_ratio", "warmup_min_ratio")
        tree["scheduler"]["type"] = "WarmupCosineLR" if is_cosine else "WarmupDecayLR"
    node[last] = "auto"
    return tree


@pytest.mark.parametrize("path", known_leaves(keys.KNOWN))
def test_auto_at_any_path_is_resolved_or_refused_by_that_path(path: str) -> None:
    report, message = None, ""
    try:
        report = read(tree_with_auto(path))
    except ConfigError as error:
        message = str(error)
    if report is None:
        assert f"  - {path}: " in message
    else:
        assert path in {entry.path for entry in report.resolved}
        assert '"auto"' not in json.dumps(rendered(report.config))


def test_cosine_schedule_is_mapped() -> None:
    params = {"total_num_steps": 400, "warmup_num_steps": 20, "cos_min_ratio": 0.05}
    report = read({"scheduler": {"type": "WarmupCosineLR", "params": params}})
    optimizer = report.config.optimizer
    assert optimizer.schedule == "cosine"
    assert optimizer.decay_steps == 400
    assert optimizer.warmup_steps == 20
    assert optimizer.min_learning_rate_ratio == 0.05


def test_unstated_values_stay_with_the_recipe_and_are_named() -> None:
    report = read({"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}})
    assert report.config.optimizer.beta2 == 0.95
    resolved = {entry.path: entry.value for entry in report.resolved}
    assert resolved["optimizer.params.betas"] == [0.9, 0.95]


def test_zero_clipping_is_none() -> None:
    assert read({"gradient_clipping": 0}).config.optimizer.max_grad_norm is None


def test_bf16_off_is_fp32() -> None:
    tree = {"bf16": {"enabled": False}, "fp16": {"enabled": False}}
    assert read(tree).config.precision == "fp32"


def test_older_spellings_are_taken() -> None:
    tree = {
        "bfloat16": {"enabled": True},
        "zero_optimization": {"stage": 3, "prefetch_bucket_size": 1000, "cpu_offload": True},
    }
    config = read(tree).config
    assert config.zero.offload_optimizer == "cpu"
    parsed = accepted_by_deepspeed(rendered(config), 4)
    assert parsed.zero_config.prefetch_bucket_size == 1000


def test_settings_without_effect_say_so() -> None:
    report = read({"checkpoint": {"load_universal": True}, "dataloader_drop_last": True})
    assert all("without effect" in entry.target for entry in report.passed)
    assert len(report.passed) == 2


def test_passed_settings_are_merged_with_the_recipe() -> None:
    zero = ZeroConfig(extra={"memory_breakdown": True, "aio": {"queue_depth": 4}})
    report = read({"aio": {"queue_depth": 8, "block_size": 1048576}}, zero=zero)
    assert report.config.zero.extra == {
        "memory_breakdown": True,
        "aio": {"queue_depth": 8, "block_size": 1048576},
    }


def test_a_recipe_with_an_unusable_extra_is_told_so() -> None:
    with pytest.raises(ConfigError, match=r"zero\.extra holds settings"):
        read({"memory_breakdown": True}, zero=ZeroConfig(extra={"nebula": {}}))


def test_accumulation_with_known_workers_derives_the_global_batch() -> None:
    tree = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
    report = read(tree, scaling=ScalingConfig(workers=2))
    assert report.config.batch == BatchConfig(global_batch_size=64, micro_batch_size=4)
    assert report.expected_world_size == 2


def test_check_world_names_the_ranks_that_the_file_means() -> None:
    report = read(TUTORIAL)
    check_world(report, 4)
    with pytest.raises(ConfigError, match="mean 4 ranks; this run has 8") as caught:
        check_world(report, 8)
    assert "train_batch_size as 64" in str(caught.value)


def test_check_world_without_accumulation_takes_any_world() -> None:
    check_world(read({"train_batch_size": 64}), 3)


# --- in: what is refused -------------------------------------------------------------------

ZERO3 = {"stage": 3}


@pytest.mark.parametrize(
    ("tree", "path", "said"),
    [
        ({"train_batchsize": 8}, "train_batchsize", "train_batch_size"),
        ({"overlap_comm": True}, "overlap_comm", "It belongs at zero_optimization.overlap_comm"),
        (
            {"zero_optimization": ZERO3 | {"reduce_bucket": 1}},
            "zero_optimization.reduce_bucket",
            "zero_optimization.reduce_bucket_size",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"learning_rate": 1e-4}}},
            "optimizer.params.learning_rate",
            "optimizer.params.lr",
        ),
        ({"aio": {"thread_count": 1}}, "aio.thread_count", "aio.intra_op_parallelism"),
        ({"elasticity": {"enabled": True}}, "elasticity", "batch.global_batch_size"),
        ({"nebula": {"enabled": False}}, "nebula", "Delete it"),
        ({"amp": {"enabled": True}}, "amp", '"bf16": {"enabled": true}'),
        ({"sparse_gradients": False}, "sparse_gradients", "Delete it"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning", "data.shuffle"),
        (
            {"zero_optimization": ZERO3 | {"mics_shard_size": 8}},
            "zero_optimization.mics_shard_size",
            "zero_hpz_partition_size",
        ),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "bf16.enabled",
            "both on",
        ),
        ({"fp16": {"enabled": True}}, "fp16.enabled", "fp32 and bf16"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage", "strategy=ddp"),
        ({"zero_optimization": {"stage": 1}}, "zero_optimization.stage", "zero3"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage", '"stage": 3'),
        ({"zero_optimization": {"overlap_comm": True}}, "zero_optimization.stage", "stage 0"),
        ({"zero_optimization": {}}, "zero_optimization.stage", "stage 0"),
        ({"zero_optimization": True}, "zero_optimization", '{"stage": 3}'),
        ({"bf16": True}, "bf16", '"bf16": {"enabled": true}'),
        ({"bf16": {"enabled": "true"}}, "bf16.enabled", "Write true without quotes"),
        ({"bf16": {"enabled": 1}}, "bf16.enabled", "true or false"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": "5e-5"}}},
            "optimizer.params.lr",
            "Write 5e-5 without quotes",
        ),
        ({"train_batch_size": "64"}, "train_batch_size", "Write 64 without quotes"),
        ({"train_batch_size": 0}, "train_batch_size", "above 0"),
        ({"train_batch_size": 2.5}, "train_batch_size", "whole number"),
        ({"train_batch_size": 10**400}, "train_batch_size", "whole number"),
        ({"train_batch_size": True}, "train_batch_size", "whole number"),
        (
            {"zero_optimization": ZERO3 | {"reduce_bucket_size": "5e8"}},
            "zero_optimization.reduce_bucket_size",
            "Write 5e8 without quotes",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}},
            "optimizer.params.betas",
            "two numbers",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": ["auto", 0.9]}}},
            "optimizer.params.betas[0]",
            "auto",
        ),
        ({"optimizer": {"type": "Lamb", "params": {}}}, "optimizer.type", "AdamW"),
        ({"optimizer": {"params": {"lr": 1e-4}}}, "optimizer.type", "missing"),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            "optimizer.params.adam_w_mode",
            "decoupled",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}},
            "optimizer.params.max_grad_norm",
            "gradient_clipping",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": -1.0}}},
            "optimizer.params.lr",
            "above 0",
        ),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "scheduler.type", "WarmupCosineLR"),
        ({"scheduler": {"type": "WarmupCosine"}}, "scheduler.type", "Write WarmupCosineLR"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-6}}},
            "scheduler.params.warmup_min_lr",
            "starts at 0",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log"}}},
            "scheduler.params.warmup_type",
            "linear",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 10}}},
            "scheduler.params.total_num_steps",
            "WarmupLR does not take it",
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 0}}},
            "scheduler.params.total_num_steps",
            "above 0",
        ),
        (
            {
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-4}},
            },
            "scheduler.params.warmup_max_lr",
            "contradicts",
        ),
        (
            {
                "train_batch_size": 10,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
            },
            "gradient_accumulation_steps",
            "no number of ranks",
        ),
        (
            {"zero_optimization": ZERO3 | {"offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.device",
            "host memory only",
        ),
        (
            {"zero_optimization": ZERO3 | {"offload_optimizer": {"device": "gpu"}}},
            "zero_optimization.offload_optimizer.device",
            '"cpu" or "none"',
        ),
        (
            {
                "zero_optimization": ZERO3
                | {"max_live_parameters": 1, "stage3_max_live_parameters": 2}
            },
            "zero_optimization.max_live_parameters",
            "older name",
        ),
        ({"bf16": {"enabled": True}, "bfloat16": {}}, "bfloat16", "older name"),
        ({"aio": {"queue_depth": "auto"}}, "aio.queue_depth", "cannot be resolved"),
        (
            {"zero_optimization": ZERO3 | {"leaf_module": {"names": ["auto"]}}},
            "zero_optimization.leaf_module.names[0]",
            "cannot be resolved",
        ),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled", "precision"),
        ({"data_types": {"param_dtype": "fp32"}}, "data_types.param_dtype", "bf16"),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "bf16.bf16_master_weights_and_grads",
            "always fp32",
        ),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op", "averages"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size", "data-parallel"),
        ({"comet": {"api_key": "hunter2"}}, "comet.api_key", "COMET_API_KEY"),
    ],
)
def test_refused_by_path_with_the_correction(tree: dict[str, Any], path: str, said: str) -> None:
    message = problems_of(tree)
    lines = [line for line in message.splitlines() if line.startswith(f"  - {path}: ")]
    assert any(said in line for line in lines), message


def test_all_refusals_come_together() -> None:
    tree = {
        "elasticity": {},
        "fp16": {"enabled": True},
        "train_batch_size": "8",
        "zero_optimization": {"stage": 2, "sub_group_sise": 1},
    }
    message = problems_of(tree)
    assert "6 settings" in message  # fp16 twice: not in this version, and against precision=bf16
    assert message.count("\n  - ") == 6


def test_a_secret_is_not_repeated() -> None:
    assert "hunter2" not in problems_of({"comet": {"api_key": "hunter2"}})


def test_a_refused_size_causes_no_second_complaint() -> None:
    tree = {"train_batch_size": "30", "gradient_accumulation_steps": 7}
    assert "1 setting that" in problems_of(tree)


def test_batch_fields_against_known_workers() -> None:
    message = problems_of(TUTORIAL, scaling=ScalingConfig(workers=3))
    assert "mean 4 ranks; this run has 3" in message


def test_strategy_ddp_takes_no_deepspeed_settings() -> None:
    assert "strategy=ddp" in problems_of({"memory_breakdown": True}, strategy="ddp")


def test_file_errors(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    for text, said in (
        ('{\n  "bf16": {"enabled": true},\n}', "line 3, column 1"),
        ('{"a": 1 // note\n}', "line 1, column 9"),
        ("", "line 1, column 1"),
        ('{"a": 1\n', "line 2, column 1"),
        ('{"gradient_clipping": 1e999}', "a number is needed"),
        ("[1]", "where an object is needed"),
        ('{"gradient_clipping": NaN}', "NaN"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            read_ds_config(path, run_config())
        assert said in str(caught.value)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        read_ds_config(path, run_config())
    with pytest.raises(ConfigError, match="There is no DeepSpeed configuration"):
        read_ds_config(tmp_path / "none.json", run_config())
    with pytest.raises(ConfigError, match="cannot be read"):
        read_ds_config(tmp_path, run_config())


def test_repeated_keys_are_named_by_path(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{"bf16": {"enabled": true, "enabled": false}, "autotuning": {"x": {"y": 1, "y": 2}},'
        ' "zero_optimization": {"stage": 3}}',
        encoding="utf-8",
    )
    with pytest.raises(ConfigError) as caught:
        read_ds_config(path, run_config())
    assert "bf16.enabled: it stands here more than once" in str(caught.value)
    assert "autotuning.x.y: it stands here more than once" in str(caught.value)
