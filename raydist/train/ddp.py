# SPDX-License-Identifier: Apache-2.0
"""The DDP engine: replicated state, gradients averaged over ranks at the boundary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

from raydist.checkpoint.ranges import WantedRange
from raydist.config import RunConfig
from raydist.train.adamw import (
    MOMENTS,
    adam_step,
    adamw,
    create_moments,
    parameter_groups,
    set_adam_step,
)
from raydist.train.engine import StepResult
from raydist.train.job import Batch, Job
from raydist.train.tensors import (
    HeldRange,
    export_ranges,
    load_ranges,
    mean_over_ranks,
    persistent_buffers,
    replica_slice,
    spread_replicas,
)
from raydist.train.weights import initialize_weights
from raydist.world import BatchPlan


class DdpEngine:
    """fp32 weights on every rank; bf16 is autocast over them."""

    def __init__(self, job: Job, config: RunConfig, batch: BatchPlan, device: torch.device) -> None:
        module = job.build_model(config)
        module.float().to(device)
        initialize_weights(module, seed=config.seed)
        self._loss_fn = job.loss_fn
        self._device = device
        self._is_bf16 = config.precision == "bf16"
        self._accumulation = batch.gradient_accumulation_steps
        self._max_grad_norm = config.optimizer.max_grad_norm or float("inf")
        self._optimizer = adamw(parameter_groups(module, config.optimizer), config.optimizer)
        create_moments(self._optimizer, self._trained())
        self._ddp = DistributedDataParallel(
            module,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # or each rank holds every gradient twice
        )

    @property
    def model(self) -> torch.nn.Module:
        """The wrapped module."""
        return self._ddp

    def step(self, micro_batches: Sequence[Batch], *, learning_rate: float) -> StepResult:
        """Accumulate locally, all-reduce with the last micro batch, clip, update or skip."""
        total = torch.zeros((), device=self._device)
        last = len(micro_batches) - 1
        for number, micro_batch in enumerate(micro_batches):
            with nullcontext() if number == last else self._ddp.no_sync():
                with torch.autocast(self._device.type, torch.bfloat16, enabled=self._is_bf16):
                    loss = self._loss_fn(self._ddp, micro_batch) / self._accumulation
                loss.backward()
            total += loss.detach().float()
        norm = torch.nn.utils.clip_grad_norm_(self._trained(), self._max_grad_norm).item()
        skipped = not math.isfinite(norm)
        if not skipped:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(loss=mean_over_ranks(total), grad_norm=norm, skipped=skipped)

    def wanted(self) -> list[WantedRange]:
        """This rank's slice of every tensor; ``load`` spreads the slices."""
        return [held.wanted for held in self._held()]

    def export(self, buffers: dict[str, memoryview]) -> dict[str, float]:
        """Copy this rank's slices into ``buffers``; return Adam's step count."""
        export_ranges(self._held(), buffers)
        return {"adam_step": adam_step(self._optimizer)}

    def load(self, buffers: Mapping[str, memoryview], scalars: dict[str, float]) -> None:
        """Set this rank's slices, then gather the whole from all ranks."""
        load_ranges(self._held(), buffers)
        spread_replicas(list(self._tensors().values()))
        set_adam_step(self._optimizer, scalars["adam_step"])

    def _trained(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _tensors(self) -> dict[str, torch.Tensor]:
        module = self._ddp.module
        tensors: dict[str, torch.Tensor] = {}
        for name, p in module.named_parameters():
            tensors[f"master/{name}"] = p
            for kind in MOMENTS if p.requires_grad else ():
                tensors[f"{kind}/{name}"] = self._optimizer.state[p][kind]
        for name, buffer in persistent_buffers(module).items():
            tensors[f"buffer/{name}"] = buffer
        return tensors

    def _held(self) -> list[HeldRange]:
        return [replica_slice(key, tensor) for key, tensor in self._tensors().items()]
