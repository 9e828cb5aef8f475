# SPDX-License-Identifier: Apache-2.0
"""Checks of a run's configuration, and what of it is its mathematics. Nothing is faked."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from typing import Any

import pytest

from raydist.config import (
    RunConfig,
    config_hash,
    diff_mathematics,
    mathematics,
    to_json_dict,
)
from raydist.errors import ConfigError
from raydist.testing.configs import small_config


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("name", "", "name='' cannot be a folder"),
        ("name", "a/b", "name='a/b'"),
        ("name", "..", r"name='\.\.'"),
        ("name", "-x", "name='-x'"),
        ("name", "x" * 101, "name='xxx"),
        ("name", "run\n", "name='run"),
        ("num_steps", 0, "num_steps=0 plans no optimizer step"),
        ("model.vocab_size", 0, r"model\.vocab_size=0 is not above 0"),
        ("model.vocab_size", 256, r"model\.vocab_size=256 is smaller than the 257 ids"),
        ("model.num_layers", -1, r"model\.num_layers=-1 is not above 0"),
        ("model.hidden_size", 15, r"model\.hidden_size=15 is not a multiple of .*_heads=2"),
        ("model.num_key_value_heads", 3, r"num_attention_heads=2 is not a multiple of .*=3"),
        ("batch.global_batch_size", 0, r"batch\.global_batch_size=0"),
        ("batch.micro_batch_size", -2, r"batch\.micro_batch_size=-2"),
        ("optimizer.learning_rate", 0.0, r"optimizer\.learning_rate=0\.0"),
        ("optimizer.learning_rate", math.nan, r"optimizer\.learning_rate=nan"),
        ("optimizer.learning_rate", math.inf, r"optimizer\.learning_rate=inf"),
        ("optimizer.beta1", 1.5, r"optimizer\.beta1=1\.5 is not in \[0, 1\)"),
        ("optimizer.beta2", -0.1, r"optimizer\.beta2=-0\.1"),
        ("optimizer.beta2", math.nan, r"optimizer\.beta2=nan"),
        ("optimizer.min_learning_rate_ratio", 2.0, r"min_learning_rate_ratio=2\.0"),
        ("optimizer.weight_decay", -1.0, r"optimizer\.weight_decay=-1\.0"),
        ("optimizer.warmup_steps", -1, r"optimizer\.warmup_steps=-1"),
        ("optimizer.warmup_steps", 11, r"warmup_steps=11 is longer than the schedule of 10"),
        ("optimizer.decay_steps", 0, r"optimizer\.decay_steps=0"),
        ("optimizer.max_grad_norm", 0.0, r"optimizer\.max_grad_norm=0\.0"),
        ("data.sequence_length", 1, r"data\.sequence_length=1 leaves nothing to predict"),
        ("checkpoint.every_steps", 0, r"checkpoint\.every_steps=0"),
        ("checkpoint.max_abandoned", 0, r"checkpoint\.max_abandoned=0"),
        ("checkpoint.keep_last", 0, r"checkpoint\.keep_last=0"),
        ("checkpoint.keep_every_steps", 0, r"checkpoint\.keep_every_steps=0"),
        ("checkpoint.keep_every_steps", 9, r"keep_every_steps=9 has no effect"),
        ("checkpoint.every_s", 0.0, r"checkpoint\.every_s=0\.0"),
        ("checkpoint.agree_timeout_s", 0.0, r"checkpoint\.agree_timeout_s=0\.0"),
        ("fault.node_mtbf_hours", 0.0, r"fault\.node_mtbf_hours=0\.0"),
        ("scaling.workers", 0, r"scaling\.workers=0"),
        ("scaling.cpus_per_worker", 0.0, r"scaling\.cpus_per_worker=0\.0"),
        ("scaling.nodes", 2, r"scaling\.nodes=2 without scaling\.gpus_per_node"),
        ("scaling.start_timeout_s", -1.0, r"scaling\.start_timeout_s=-1\.0"),
        ("network.master_port", 80, r"network\.master_port=80 is not in \[1024, 65535\]"),
        ("network.master_port", 65536, r"network\.master_port=65536"),
        ("network.timeout_s", 0.0, r"network\.timeout_s=0\.0"),
        ("fault.max_worker_failures", -1, r"fault\.max_worker_failures=-1"),
        ("fault.max_nonfinite_steps", 0, r"fault\.max_nonfinite_steps=0"),
        ("metrics.progress_every_s", 0.0, r"metrics\.progress_every_s=0\.0"),
    ],
)
def test_config_value_that_cannot_be_is_refused_by_its_key(
    key: str, value: Any, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        small_config(**{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "x" * 100),
        ("name", "Run_1.2-b"),
        ("num_steps", 1),
        ("model.vocab_size", 257),
        ("optimizer.warmup_steps", 10),
        ("optimizer.max_grad_norm", None),
        ("optimizer.weight_decay", 0.0),
        ("optimizer.beta1", 0.0),
        ("optimizer.min_learning_rate_ratio", 0.0),
        ("checkpoint.every_steps", None),
        ("checkpoint.every_steps", "auto"),
        ("checkpoint.every_s", 0.5),
        ("fault.max_worker_failures", 0),
        ("metrics.sample_tokens", 0),
        ("network.master_port", 1024),
        ("scaling.cpus_per_worker", 0.5),
    ],
)
def test_config_value_at_the_edge_is_accepted(key: str, value: Any) -> None:
    small_config(**{key: value})


def test_config_several_gpus_per_worker_offers_as_many_workers() -> None:
    with pytest.raises(ConfigError, match=r"Use scaling\.workers=8 with scaling\.gpus_per_worker"):
        small_config(**{"scaling.workers": 2, "scaling.gpus_per_worker": 4})


def test_config_workers_against_nodes_offers_their_product() -> None:
    nodes = {"scaling.nodes": 2, "scaling.gpus_per_node": 8}
    with pytest.raises(ConfigError, match=r"(?s)contradicts .* set it to 16"):
        small_config(**nodes, **{"scaling.workers": 8})
    assert small_config(**nodes, **{"scaling.workers": 16}).scaling.planned_workers == 16
    assert small_config(**nodes).scaling.planned_workers == 16
    assert small_config().scaling.planned_workers is None


def test_config_auto_interval_beside_a_chosen_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)every_steps=auto .*every_s=60 .*Leave .*every_s"):
        small_config(**{"checkpoint.every_steps": "auto", "checkpoint.every_s": 60.0})
    small_config(**{"checkpoint.every_steps": 100, "checkpoint.every_s": 60.0})
    small_config(**{"checkpoint.every_steps": None, "checkpoint.every_s": 60.0})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("zero.offload_optimizer", "cpu"),
        ("zero.offload_parameters", "cpu"),
        ("zero.extra", {"wall_clock_breakdown": True}),
    ],
)
def test_config_zero_section_without_zero3_is_refused(key: str, value: Any) -> None:
    small_config(**{key: value})
    with pytest.raises(ConfigError, match="strategy=ddp takes nothing from the zero section"):
        small_config(strategy="ddp", **{key: value})


def test_config_is_frozen_equal_by_content_and_picklable() -> None:
    config = small_config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_steps = 11  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config == small_config()


def test_config_planned_tokens_are_steps_x_batch_x_sequence() -> None:
    assert small_config().planned_tokens == 10 * 8 * 4


def test_config_json_round_trip_holds_every_section() -> None:
    config = small_config(**{"zero.extra": {"a": {"b": 1}}})
    values = json.loads(json.dumps(to_json_dict(config)))
    assert set(values) == {field.name for field in dataclasses.fields(RunConfig)}
    assert values["model"]["vocab_size"] == 272
    assert values["zero"]["extra"] == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "another"),
        ("strategy", "ddp"),
        ("resume", "must"),
        ("storage", "s3://b/runs"),
        ("batch.micro_batch_size", 4),
        ("scaling.workers", 4),
        ("scaling.cpus_per_worker", 2.0),
        ("zero.offload_optimizer", "cpu"),
        ("checkpoint.every_steps", 7),
        ("network.timeout_s", 60.0),
        ("fault.max_worker_failures", 9),
        ("metrics.sample_tokens", 0),
    ],
)
def test_mathematics_ignore_how_the_work_is_spread_and_watched(key: str, value: Any) -> None:
    config = small_config(**{key: value})
    assert diff_mathematics(mathematics(small_config()), mathematics(config)) == {}
    assert config_hash(config) == config_hash(small_config())


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("seed", 0, 1),
        ("precision", "bf16", "fp32"),
        ("model.num_layers", 2, 3),
        ("model.tie_embeddings", False, True),
        ("model.rms_norm_eps", 1e-6, 1e-5),
        ("model.weights", None, "/weights"),
        ("batch.global_batch_size", 8, 16),
        ("optimizer.learning_rate", 1e-3, 2e-3),
        ("optimizer.max_grad_norm", 1.0, None),
        ("optimizer.warmup_steps", 0, 2),
        ("data.source", "python-stdlib", "/texts"),
        ("data.sequence_length", 4, 8),
        ("data.shuffle", True, False),
    ],
)
def test_mathematics_changed_are_told_by_key_with_both_values(key: str, old: Any, new: Any) -> None:
    config = small_config(**{key: new})
    assert diff_mathematics(mathematics(small_config()), mathematics(config)) == {key: (old, new)}
    assert config_hash(config) != config_hash(small_config())


def test_mathematics_of_longer_runs_differ_only_where_the_schedule_does() -> None:
    longer = mathematics(small_config(num_steps=20))
    assert diff_mathematics(mathematics(small_config()), longer) == {
        "optimizer.decay_steps": (10, 20)
    }
    fixed = {"optimizer.decay_steps": 10}
    assert mathematics(small_config(num_steps=20, **fixed)) == mathematics(small_config())


def test_mathematics_of_an_earlier_raydist_have_the_defaults_of_keys_it_did_not_know() -> None:
    earlier = mathematics(small_config())
    del earlier["model.rms_norm_eps"], earlier["model.weights"]
    assert diff_mathematics(earlier, mathematics(small_config())) == {}
    changed = mathematics(small_config(**{"model.rms_norm_eps": 1e-5}))
    assert diff_mathematics(earlier, changed) == {"model.rms_norm_eps": (1e-6, 1e-5)}


def test_mathematics_of_another_raydist_tell_keys_that_came_or_went() -> None:
    assert diff_mathematics({"a": 1, "gone": 2}, {"a": 1, "came": 3}) == {
        "came": (None, 3),
        "gone": (2, None),
    }


def test_config_hash_is_frozen() -> None:
    """It stands in every checkpoint: equal numbers keep equal hashes in later raydists."""
    assert config_hash(small_config()) == "4ca80f5d3d0b441c"
