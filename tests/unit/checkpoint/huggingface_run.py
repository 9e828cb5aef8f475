# SPDX-License-Identifier: Apache-2.0
"""A run on storage that holds a small Llama or Qwen2: what an export begins from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from checkpoint_scenario import IDENTITY, progress_at

from raydist.checkpoint.attempt import open_attempt
from raydist.checkpoint.ranges import LocalRange, TensorSpec, partition
from raydist.checkpoint.runs import write_run
from raydist.checkpoint.saver import Saver
from raydist.config import BatchConfig, DataConfig, ModelConfig, OptimizerConfig, RunConfig
from raydist.storage import ObjectStore
from raydist.testing.fake_clock import FakeClock
from raydist.testing.thread_group import ThreadGroup

LENGTH = 32


def run_config(**model: object) -> RunConfig:
    shape = {
        "vocab_size": 277,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 50_000.0,
        "rms_norm_eps": 1e-5,
    }
    return RunConfig(
        name="toy",
        num_steps=10,
        model=ModelConfig(**{**shape, **model}),
        batch=BatchConfig(global_batch_size=12, micro_batch_size=1),
        optimizer=OptimizerConfig(learning_rate=0.01),
        data=DataConfig(source="x", sequence_length=LENGTH),
    )


def commit_tensors(
    store: ObjectStore,
    tensors: Mapping[str, torch.Tensor],
    *,
    step: int = 7,
    world_size: int = 3,
    config: RunConfig | None = None,
) -> None:
    """Commit ``tensors``, by key, as ``world_size`` ranks with a partition of each."""
    group = ThreadGroup(world_size)
    attempt = open_attempt(run="toy", store=store, driver="d", clock=FakeClock())
    attempt.release()
    if config is not None:
        write_run(store, config, versions={}, revision="", clock=FakeClock())

    def save(member) -> None:
        saver = Saver(
            store=store,
            group=member,
            attempt_number=attempt.number,
            attempt=attempt if member.rank == 0 else None,
            identity=IDENTITY,
            max_abandoned=1,
        )
        ranges = []
        for key, tensor in tensors.items():
            flat = tensor.detach().reshape(-1).contiguous()
            offset, length = partition(flat.numel(), world_size=world_size, rank=member.rank)
            raw = bytearray(flat[offset : offset + length].view(torch.uint8).numpy().tobytes())
            dtype = {torch.float32: "F32", torch.bfloat16: "BF16"}[flat.dtype]
            spec = TensorSpec(key=key, shape=tuple(tensor.shape), dtype=dtype)
            ranges.append(LocalRange(spec=spec, offset=offset, length=length, data=memoryview(raw)))
        saver.save(ranges, progress=progress_at(step), scalars={"adam_step": float(step)})

    group.run(save)
