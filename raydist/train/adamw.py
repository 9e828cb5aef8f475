# SPDX-License-Identifier: Apache-2.0
"""AdamW with the parameter groups that every engine shares."""

from __future__ import annotations

from typing import Any

import torch

from raydist.config import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's per-element state, as torch names it."""


def full_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """Return the shape a parameter has when whole, also when ZeRO-3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def parameter_groups(model: torch.nn.Module, optimizer: OptimizerConfig) -> list[dict[str, Any]]:
    """Return two groups: matrices with weight decay, norms and biases without."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in trained if len(full_shape(p)) >= 2],
            "weight_decay": optimizer.weight_decay,
        },
        {"params": [p for p in trained if len(full_shape(p)) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(groups: list[dict[str, Any]], optimizer: OptimizerConfig) -> torch.optim.Optimizer:
    """Return torch's AdamW over ``groups``, fused where the device has it."""
    return torch.optim.AdamW(
        groups,
        lr=optimizer.learning_rate,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        fused=torch.cuda.is_available() or None,
    )
