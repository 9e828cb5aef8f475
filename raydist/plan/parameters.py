# SPDX-License-Identifier: Apache-2.0
"""Names and shapes of a model's parameters, computed from its configuration alone."""

from __future__ import annotations

import math

from raydist.config import ModelConfig


def block_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return {name inside one decoder block: shape}, in the order the module registers them.

    Source: transformers 5.24, models/llama/modeling_llama.py and models/qwen2/modeling_qwen2.py;
    qwen2 has biases on q, k and v, and neither has one anywhere else.
    """
    hidden = model.hidden_size
    key_value = hidden // model.num_attention_heads * model.num_key_value_heads
    shapes: dict[str, tuple[int, ...]] = {}
    for name, width in (("q", hidden), ("k", key_value), ("v", key_value)):
        shapes[f"self_attn.{name}_proj.weight"] = (width, hidden)
        if model.architecture == "qwen2":
            shapes[f"self_attn.{name}_proj.bias"] = (width,)
    return shapes | {
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (model.intermediate_size, hidden),
        "mlp.up_proj.weight": (model.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, model.intermediate_size),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return {parameter name: shape} as ``named_parameters()`` of the model gives them.

    Names, shapes and order are those of transformers' LlamaForCausalLM and Qwen2ForCausalLM.
    Tied embeddings are one parameter, under the name of the input embedding.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    shapes["model.embed_tokens.weight"] = (model.vocab_size, model.hidden_size)
    block = block_shapes(model)
    for layer in range(model.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    shapes["model.norm.weight"] = (model.hidden_size,)
    if not model.tie_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, model.hidden_size)
    return shapes


def count_parameters(model: ModelConfig) -> int:
    """Return the number of trainable elements, tied ones counted once."""
    return sum(math.prod(shape) for shape in parameter_shapes(model).values())
