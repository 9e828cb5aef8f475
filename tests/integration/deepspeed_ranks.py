"""Train the job's Llama with bare DeepSpeed and save it, state and all; run by torchrun.

    torchrun --nproc-per-node W deepspeed_ranks.py STAGE PRECISION FOLDER

Rank 0 also writes FOLDER/expected.safetensors: every fp32 master and moment whole, as DeepSpeed's
own accessors give them in memory; under ZeRO-1 and 2 they give no moments, so these are gathered
and cut by the optimizer's own offsets.
"""

import os
import sys
from pathlib import Path

from raydist.train.environment import quiet_libraries, select_accelerator

select_accelerator()
quiet_libraries()
sys.path.insert(0, str(Path(__file__).parents[2] / "jobs"))

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401  # cannot be imported under zero.Init
from deepspeed.utils import (  # noqa: E402
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
)
from llama_zero3 import build_model, llama_tiny  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from raydist.config.cli import parse_request  # noqa: E402

SHAPE = [
    "--model.hidden-size", "64", "--model.intermediate-size", "128", "--model.num-layers", "2",
    "--model.num-attention-heads", "4", "--model.num-key-value-heads", "2",
    "--data.sequence-length", "64",
]  # fmt: skip


KINDS = ("exp_avg", "exp_avg_sq")


def moments(engine):
    """The moments of ZeRO-1 and 2, whole."""
    zero = engine.optimizer
    names = {id(p): name for name, p in engine.module.named_parameters()}
    found = {}
    for group, mine in enumerate(zero.single_partition_of_fp32_groups):
        for kind in KINDS:
            part = zero.optimizer.state[mine][kind]
            parts = [torch.empty_like(part) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(parts, part)
            whole = torch.cat(parts)
            offsets = zero.round_robin_bit16_offsets[group]
            for p, at in zip(zero.round_robin_bit16_groups[group], offsets, strict=True):
                found[f"{kind}/{names[id(p)]}"] = whole[at : at + p.numel()].view(p.shape)
    return found


def main():
    stage, precision, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.manual_seed(4)
    config = parse_request({"llama_tiny": llama_tiny}, SHAPE, program="x").config
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    ds_config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16", "initial_scale_power": 8},
        "gradient_clipping": 1.0,
        "steps_per_print": 1000,
    }
    if stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=ds_config):
            model = build_model(config)
    else:
        model = build_model(config)
    matrices = [p for p in model.parameters() if len(getattr(p, "ds_shape", p.shape)) > 1]
    vectors = [p for p in model.parameters() if len(getattr(p, "ds_shape", p.shape)) == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)[0]
    rank = torch.distributed.get_rank()
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        tokens = torch.randint(257, (2, 32), generator=generator)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(str(folder), tag="third")
    expected = {}
    for name, parameter in engine.module.named_parameters():
        expected[f"master/{name}"] = safe_get_full_fp32_param(parameter)
        for kind in KINDS if stage == 3 else ():
            expected[f"{kind}/{name}"] = safe_get_full_optimizer_state(parameter, kind)
    if stage < 3:
        expected |= moments(engine)
    if rank == 0:
        whole = {k: v.detach().clone().contiguous() for k, v in expected.items()}
        save_file(whole, folder / "expected.safetensors")
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
