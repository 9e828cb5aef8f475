# SPDX-License-Identifier: Apache-2.0
"""Parameter names and shapes. Real: transformers' models, on the meta device."""

from __future__ import annotations

from typing import Any

import pytest

from raydist.config import ModelConfig
from raydist.plan import count_parameters, parameter_shapes

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def model_config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    return ModelConfig(**values | changes)


LLAMA3_8B = model_config(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)
LLAMA3_70B = model_config(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
)
QWEN2_72B = model_config(
    architecture="qwen2",
    vocab_size=152064,
    hidden_size=8192,
    intermediate_size=29568,
    num_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
)


@pytest.mark.parametrize(
    "model",
    [
        model_config(),
        model_config(num_key_value_heads=2),
        model_config(num_key_value_heads=1, num_layers=1),
        model_config(tie_embeddings=True),
        model_config(architecture="qwen2"),
        model_config(architecture="qwen2", num_key_value_heads=2, tie_embeddings=True),
        LLAMA3_8B,
    ],
)
def test_names_shapes_and_order_are_those_of_transformers(model: ModelConfig) -> None:
    family = "Llama" if model.architecture == "llama" else "Qwen2"
    config = getattr(transformers, f"{family}Config")(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        tie_word_embeddings=model.tie_embeddings,
    )
    with torch.device("meta"):
        built = getattr(transformers, f"{family}ForCausalLM")(config)
    built.tie_weights()
    expected = [(name, tuple(p.shape)) for name, p in built.named_parameters()]
    assert list(parameter_shapes(model).items()) == expected
    assert count_parameters(model) == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (LLAMA3_8B, 8_030_261_248),
        (LLAMA3_70B, 70_553_706_496),
        (QWEN2_72B, 72_706_203_648),
    ],
)
def test_published_models_have_their_published_size(model: ModelConfig, expected: int) -> None:
    assert count_parameters(model) == expected
