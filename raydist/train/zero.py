# SPDX-License-Identifier: Apache-2.0
"""The ZeRO-3 engine: DeepSpeed's, with its partitions as checkpoint ranges.

Only this file and ``rendezvous`` import deepspeed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed
import torch
import torch._dynamo  # Cannot be imported once zero.Init has replaced tensor constructors.

from raydist.checkpoint.ranges import WantedRange, partition
from raydist.config import RunConfig
from raydist.config.deepspeed import render
from raydist.train.adamw import (
    MOMENTS,
    adam_step,
    adamw,
    create_moments,
    parameter_groups,
    set_adam_step,
)
from raydist.train.engine import StepResult
from raydist.train.host_memory import freed_at_once
from raydist.train.job import Batch, Job
from raydist.train.tensors import (
    HeldRange,
    export_ranges,
    load_ranges,
    mean_over_ranks,
    persistent_buffers,
    replica_slice,
    spec_of,
    spread_replicas,
)
from raydist.train.weights import initialize_weights
from raydist.world import BatchPlan

# deepspeed.initialize imports DeepSpeed's Muon to see whether our optimizer is one, and the
# torch.compile decorators in it import the inductor: 1.4 s that nothing here uses.
with torch._dynamo.config.patch(disable=True):
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401


class ZeroEngine:
    """Parameters, gradients and optimizer state partitioned over all ranks."""

    def __init__(self, job: Job, config: RunConfig, batch: BatchPlan, device: torch.device) -> None:
        ds_config = render(config, batch)
        module = build_partitioned(job, config, ds_config)
        groups = parameter_groups(module, config.optimizer)
        if config.zero.offload_optimizer == "cpu":
            optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(
                groups,
                lr=config.optimizer.learning_rate,
                betas=(config.optimizer.beta1, config.optimizer.beta2),
                eps=config.optimizer.eps,
            )
        else:
            optimizer = adamw(groups, config.optimizer)
        self._engine: Any = deepspeed.initialize(
            model=module, optimizer=optimizer, config=ds_config
        )[0]
        self._zero: Any = self._engine.optimizer
        self._loss_fn = job.loss_fn
        self._device = device
        self._accumulation = batch.gradient_accumulation_steps
        create_moments(self._zero.optimizer, self._zero.fp32_partitioned_groups_flat)

    @property
    def model(self) -> torch.nn.Module:
        """DeepSpeed's engine, which is the module to call."""
        return self._engine

    def step(self, micro_batches: Sequence[Batch], *, learning_rate: float) -> StepResult:
        """One optimizer step; DeepSpeed divides the loss and reduces at every micro-step.

        DeepSpeed leaves the update out, on all ranks, when the global gradient norm is not
        finite.
        """
        for group in self._zero.param_groups:
            group["lr"] = learning_rate
        total = torch.zeros((), device=self._device)
        for micro_batch in micro_batches:
            loss = self._loss_fn(self._engine, micro_batch)
            self._engine.backward(loss)
            self._engine.step()
            total += loss.detach().float() / self._accumulation
        return StepResult(
            loss=mean_over_ranks(total),
            grad_norm=float(self._engine.get_global_grad_norm()),
            skipped=bool(self._zero.overflow),
        )

    def wanted(self) -> list[WantedRange]:
        """This rank's partition of every tensor, and its slice of replicated buffers."""
        return [held.wanted for held in self._held()]

    def export(self, buffers: dict[str, memoryview]) -> dict[str, float]:
        """Copy this rank's partitions into ``buffers``; return Adam's step count."""
        export_ranges(self._held(), buffers)
        return {"adam_step": adam_step(self._zero.optimizer)}

    def load(self, buffers: Mapping[str, memoryview], scalars: dict[str, float]) -> None:
        """Set partitions, then renew what the next forward gathers from them.

        The fp32 masters and moments are the state; the partitions that forward gathers, and
        the small parameters that stay whole on every rank, are copies that must follow.
        """
        self._zero.checkpoint_event_prologue()
        load_ranges(self._held(), buffers)
        set_adam_step(self._zero.optimizer, scalars["adam_step"])
        for number in range(len(self._zero.fp16_groups)):
            self._zero._reassign_or_swap_out_partitioned_parameters(number)
        self._zero.checkpoint_event_epilogue()
        spread_replicas(list(persistent_buffers(self._engine.module).values()))

    def _partitions(self, p: Any) -> dict[str, torch.Tensor]:
        """Return views of a parameter's live fp32 state, wherever it lies.

        DeepSpeed's own accessors return device copies of offloaded state.
        """
        if not p.requires_grad:
            return {"master": p.ds_tensor.data}
        group, offset, length = self._zero.grad_position[self._zero.get_param_id(p)]
        flat = self._zero.fp32_partitioned_groups_flat[group]
        state = self._zero.optimizer.state[flat]
        tensors = {"master": flat, **{kind: state[kind] for kind in MOMENTS}}
        return {kind: t.detach().narrow(0, offset, length) for kind, t in tensors.items()}

    def _held(self) -> list[HeldRange]:
        rank = torch.distributed.get_rank()
        world_size = torch.distributed.get_world_size()
        held: list[HeldRange] = []
        for name, p in self._engine.module.named_parameters():
            offset, length = partition(p.ds_numel, world_size=world_size, rank=rank)
            held += [
                HeldRange(
                    spec=spec_of(f"{kind}/{name}", p.ds_shape, part.dtype),
                    offset=offset,
                    tensor=part.view(-1)[:length],
                )
                for kind, part in self._partitions(p).items()
            ]
        for name, buffer in persistent_buffers(self._engine.module).items():
            held.append(replica_slice(f"buffer/{name}", buffer))
        return held


def build_partitioned(job: Job, config: RunConfig, ds_config: dict[str, Any]) -> torch.nn.Module:
    """Return the job's model, partitioned as it is created and initialized layer by layer.

    At no time does a rank hold more than its part and one layer twice (the layer as it is made
    whole, and the copy that is broadcast).
    """
    with freed_at_once():
        with deepspeed.zero.Init(config_dict_or_path=ds_config):
            module = job.build_model(config)
        initialize_weights(module, seed=config.seed, gather=_whole)
    return module


def _whole(parameters: list[torch.nn.Parameter]) -> Any:
    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)
