# SPDX-License-Identifier: Apache-2.0
"""AdamW with the parameter groups that every engine shares."""

from __future__ import annotations

from collections.abc import Iterable
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


def create_moments(optimizer: Any, parameters: Iterable[torch.Tensor]) -> None:
    """Give each parameter the state that the first update would create, all zero.

    A restore needs it before that update. torch's AdamW keeps its step count as a tensor, on the
    device where it is fused; DeepSpeed's CPU Adam keeps a number.
    """
    is_torch = isinstance(optimizer, torch.optim.AdamW)
    is_fused = is_torch and bool(optimizer.defaults.get("fused"))
    for p in parameters:
        state = optimizer.state[p]
        if state:
            continue
        on = p.device if is_fused else torch.device("cpu")
        state["step"] = torch.zeros((), device=on) if is_torch else 0
        for kind in MOMENTS:
            state[kind] = torch.zeros_like(p)


def adam_step(optimizer: Any) -> float:
    """Return the number of updates taken, the same for every parameter."""
    return max((float(state["step"]) for state in optimizer.state.values() if state), default=0.0)


def set_adam_step(optimizer: Any, step: float) -> None:
    """Set the number of updates taken."""
    for state in optimizer.state.values():
        if torch.is_tensor(state["step"]):
            state["step"].fill_(step)
        else:
            state["step"] = int(step)
