# SPDX-License-Identifier: Apache-2.0
"""ModelConfig as transformers writes it. transformers itself is the judge; nothing is faked."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import transformers

from raydist.config import ModelConfig
from raydist.config.huggingface import (
    CLASS_NAMES,
    config_json,
    differences,
    transformers_arguments,
)
from raydist.plan.parameters import parameter_shapes

_MODEL = ModelConfig(
    vocab_size=272,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    rope_theta=500_000.0,
    rms_norm_eps=1e-5,
)
_CONFIGS = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}


def _saved(model: ModelConfig, **changes: Any) -> dict[str, Any]:
    arguments = transformers_arguments(model, max_positions=128) | changes
    return json.loads(_CONFIGS[model.architecture](**arguments).to_json_string(use_diff=False))


@pytest.mark.parametrize("architecture", CLASS_NAMES)
@pytest.mark.parametrize("tied", [False, True])
def test_config_json_rebuilds_the_same_model(tmp_path, architecture: Any, tied: bool) -> None:
    model = dataclasses.replace(_MODEL, architecture=architecture, tie_embeddings=tied)
    document = config_json(model, max_positions=128, dtype="float16", eos_token_id=256)
    (tmp_path / "config.json").write_text(json.dumps(document))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    built = transformers.AutoModelForCausalLM.from_config(config)
    assert type(built).__name__ == CLASS_NAMES[architecture]
    shapes = {name: tuple(p.shape) for name, p in built.named_parameters()}
    assert shapes == parameter_shapes(model)
    assert config.rope_parameters["rope_theta"] == 500_000.0
    assert config.rms_norm_eps == 1e-5
    assert config.eos_token_id == 256
    assert str(config.dtype) == "torch.float16"
    assert differences(model, json.loads(config.to_json_string(use_diff=False))) == []


@pytest.mark.parametrize("architecture", CLASS_NAMES)
def test_differences_of_the_same_model_are_none(architecture: Any) -> None:
    model = dataclasses.replace(_MODEL, architecture=architecture)
    assert differences(model, _saved(model)) == []
    assert differences(model, {}) == []
    assert differences(model, _saved(model, vocab_size=999, max_position_embeddings=7)) == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 128}, "model.hidden_size is 64, there hidden_size=128"),
        ({"num_hidden_layers": 3}, "model.num_layers is 2, there num_hidden_layers=3"),
        ({"rms_norm_eps": 1e-6}, "model.rms_norm_eps is 1e-05, there rms_norm_eps=1e-06"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "model.rope_theta is 500000.0, there rope_theta=10000.0",
        ),
        ({"attention_bias": True}, "whether attention has biases is False, there"),
        ({"head_dim": 32}, "the width of a head is 16, there head_dim=32"),
        ({"hidden_act": "gelu"}, "hidden_act is 'silu', there hidden_act='gelu'"),
    ],
)
def test_difference_that_changes_the_function_is_named(changes: dict[str, Any], named: str) -> None:
    assert any(named in line for line in differences(_MODEL, _saved(_MODEL, **changes)))


def test_difference_of_the_older_spelling_of_rope_is_named() -> None:
    older = {
        "model_type": "llama",
        "rope_theta": 500_000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    }
    assert differences(_MODEL, older) == ["the rope type is 'default', there rope_type='llama3'"]


def test_difference_of_architecture_is_named() -> None:
    assert differences(_MODEL, {"model_type": "mistral"}) == [
        "model.architecture is 'llama', there model_type='mistral'"
    ]
