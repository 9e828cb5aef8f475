"""Build a model larger than a rank's share under ZeRO-3 and report this rank's memory.

torchrun --nproc-per-node 2 memory_ranks.py OUT
"""

import json
import os
import sys
from pathlib import Path

from raydist.train.environment import quiet_libraries, select_accelerator

select_accelerator()
quiet_libraries()

import torch  # noqa: E402

from raydist.config import BatchConfig, DataConfig, ModelConfig, OptimizerConfig, RunConfig  # noqa: E402
from raydist.config.deepspeed import render  # noqa: E402
from raydist.train.job import Job  # noqa: E402
from raydist.train.rendezvous import TorchGroup, choose_device, join, world_from_environment  # noqa: E402
from raydist.train.zero import build_partitioned  # noqa: E402
from raydist.world import plan_batch  # noqa: E402

WIDTH, LAYERS = 2048, 12  # 50M parameters, 4M a layer


def build_model(config):
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def loss_fn(model, batch):
    return model(batch["tokens"].float()).square().mean()


def peak_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main():
    world = world_from_environment(os.environ)
    os.environ["LOCAL_SIZE"] = str(world.local_world_size)
    device = choose_device(world)
    join(world, device=device, store=None, timeout_s=60, with_deepspeed=True)
    group = TorchGroup(60)
    config = RunConfig(
        name="memory", num_steps=1, precision="fp32",
        model=ModelConfig(
            vocab_size=300, hidden_size=16, intermediate_size=16, num_layers=1,
            num_attention_heads=1, num_key_value_heads=1,
        ),
        batch=BatchConfig(global_batch_size=2, micro_batch_size=1),
        optimizer=OptimizerConfig(learning_rate=0.01),
        data=DataConfig(source="x", sequence_length=WIDTH),
    )  # fmt: skip
    job = Job(recipes=[lambda: config], build_model=build_model, loss_fn=loss_fn)
    plan = plan_batch(global_batch_size=2, micro_batch_size=1, world_size=world.world_size)

    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = peak_bytes()
    model = build_partitioned(job, config, render(config, plan))
    built = peak_bytes() - before
    held = sum(p.ds_tensor.numel() for p in model.parameters()) * 4
    found = group.gather({"built": built, "held": held})
    if found is not None:
        Path(sys.argv[1]).write_text(json.dumps(found))
    group.broadcast(None)
    os._exit(0)


if __name__ == "__main__":
    main()
