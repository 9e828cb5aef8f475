# SPDX-License-Identifier: Apache-2.0
"""A small run to change one thing of, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from raydist.config import BatchConfig, DataConfig, ModelConfig, OptimizerConfig, RunConfig


def small_config(**changes: Any) -> RunConfig:
    """Return a run of ten steps, with ``changes`` by dotted key (``**{"batch.x": 1}``).

    Checks run on the outcome, as they do for a user's.
    """
    sections: dict[str, dict[str, Any]] = {}
    top: dict[str, Any] = {}
    for key, value in changes.items():
        section, dot, field = key.partition(".")
        if dot:
            sections.setdefault(section, {})[field] = value
        else:
            top[key] = value
    for section, values in sections.items():
        top[section] = replace(getattr(_SMALL, section), **values)
    return replace(_SMALL, **top)


_SMALL = RunConfig(
    name="small",
    num_steps=10,
    model=ModelConfig(
        vocab_size=272,
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    ),
    batch=BatchConfig(global_batch_size=8, micro_batch_size=2),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    data=DataConfig(source="python-stdlib", sequence_length=4),
)
