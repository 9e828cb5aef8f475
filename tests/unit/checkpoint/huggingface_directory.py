# SPDX-License-Identifier: Apache-2.0
"""Hugging Face directories for tests, written by the safetensors package into a MemoryStore."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save

from raydist.checkpoint.huggingface_files import WeightFiles, read_weight_files
from raydist.checkpoint.ranges import TensorSpec
from raydist.testing.memory_store import MemoryStore

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (11, 6),
    "model.layers.0.mlp.up_proj.weight": (7, 6),
    "model.layers.0.self_attn.q_proj.bias": (6,),
    "model.norm.weight": (6,),
    "lm_head.weight": (11, 6),
}

Tensors = dict[str, torch.Tensor]


def tensors(
    shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


def specs(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> list[TensorSpec]:
    return [TensorSpec(key=f"master/{n}", shape=s, dtype="F32") for n, s in shapes.items()]


def single(given: Tensors, **document: Any) -> MemoryStore:
    """A directory of one file, with a config.json when it says something."""
    store = MemoryStore()
    store.put("model.safetensors", save(given))
    if document:
        store.put("config.json", json.dumps(document).encode())
    return store


def sharded(given: Tensors, per_file: int = 2) -> MemoryStore:
    store = MemoryStore()
    names = list(given)
    weight_map = {}
    for number, at in enumerate(range(0, len(names), per_file), start=1):
        file = f"model-{number:05d}-of-{-(-len(names) // per_file):05d}.safetensors"
        store.put(file, save({n: given[n] for n in names[at : at + per_file]}))
        weight_map |= dict.fromkeys(names[at : at + per_file], file)
    store.put("model.safetensors.index.json", json.dumps({"weight_map": weight_map}).encode())
    return store


def files(store: MemoryStore) -> WeightFiles:
    return read_weight_files(store, where="the-directory")
