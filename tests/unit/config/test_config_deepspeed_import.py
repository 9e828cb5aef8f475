# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's JSON, in: what is mapped, passed on and resolved."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest

pytest.importorskip("deepspeed")


from deepspeed_documents import (
    TUTORIAL,
    accepted_by_deepspeed,
    read,
    rendered,
    run_config,
)

from raydist.config import (
    BatchConfig,
    ScalingConfig,
    ZeroConfig,
)
from raydist.config import deepspeed_keys as keys
from raydist.config.deepspeed import zero_sizes
from raydist.config.deepspeed_import import check_world, read_ds_config
from raydist.errors import ConfigError

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
