# SPDX-License-Identifier: Apache-2.0
"""A ModelConfig as transformers writes it: constructor arguments, config.json, and back."""

from __future__ import annotations

from typing import Any

from raydist.config.sections import ModelConfig

CLASS_NAMES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
"""Model class in transformers, by architecture."""

_FIXED = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "use_sliding_window": False,
    "pretraining_tp": 1,
}
"""What ModelConfig cannot say otherwise, as config.json names it."""


def transformers_arguments(model: ModelConfig, *, max_positions: int) -> dict[str, Any]:
    """Return the arguments of transformers' LlamaConfig or Qwen2Config.

    Args:
        model: The shape.
        max_positions: Longest sequence that is planned for, in tokens.
    """
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": model.tie_embeddings,
    }


def config_json(
    model: ModelConfig, *, max_positions: int, dtype: str, eos_token_id: int | None
) -> dict[str, Any]:
    """Return the config.json with which ``from_pretrained`` rebuilds the model.

    Args:
        model: The shape.
        max_positions: As in ``transformers_arguments``.
        dtype: Of the weights, as torch names it (``bfloat16``).
        eos_token_id: The token that ends a document, None when unknown.
    """
    return {
        "architectures": [CLASS_NAMES[model.architecture]],
        "model_type": model.architecture,
        "dtype": dtype,
        **transformers_arguments(model, max_positions=max_positions),
        "rope_theta": model.rope_theta,  # transformers 4 reads it here
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
    }


def differences(model: ModelConfig, document: dict[str, Any]) -> list[str]:
    """Say where a config.json describes another function than ``model`` computes.

    Vocabulary and maximum length may differ; what the document leaves out is not compared.

    Returns:
        One line for each difference, by configuration key where ModelConfig has one.
    """
    rope = _rope(document)
    heads = document.get("num_attention_heads", model.num_attention_heads)
    there = {**document, "rope_theta": rope.get("rope_theta"), "rope_type": rope.get("rope_type")}
    ours = {
        "model.architecture": ("model_type", model.architecture),
        "model.hidden_size": ("hidden_size", model.hidden_size),
        "model.intermediate_size": ("intermediate_size", model.intermediate_size),
        "model.num_layers": ("num_hidden_layers", model.num_layers),
        "model.num_attention_heads": ("num_attention_heads", model.num_attention_heads),
        "model.num_key_value_heads": (
            "num_key_value_heads" if "num_key_value_heads" in document else "num_attention_heads",
            model.num_key_value_heads,
        ),
        "model.rms_norm_eps": ("rms_norm_eps", model.rms_norm_eps),
        "model.rope_theta": ("rope_theta", model.rope_theta),
        "the rope type": ("rope_type", "default"),
        "the width of a head": ("head_dim", document.get("hidden_size", 0) // heads),
        "whether attention has biases": ("attention_bias", model.architecture == "qwen2"),
    } | {f"the model's {key}": (key, value) for key, value in _FIXED.items()}
    return [
        f"{name} is {value!r}, there {key}={there[key]!r}"
        for name, (key, value) in ours.items()
        if there.get(key) is not None and there[key] != value
    ]


def _rope(document: dict[str, Any]) -> dict[str, Any]:
    """Return {rope_theta, rope_type} wherever this version of transformers put them."""
    scaling = document.get("rope_scaling") or {}
    older = {
        "rope_theta": document.get("rope_theta"),
        "rope_type": scaling.get("rope_type", scaling.get("type")),
    }
    return older | (document.get("rope_parameters") or {})
