"""Train the job's Llama with bare DeepSpeed and save it, state and all; run by torchrun.

    torchrun --nproc-per-node W deepspeed_ranks.py STAGE PRECISION FOLDER

Rank 0 also writes FOLDER/expected.safetensors: every fp32 master and moment whole, as DeepSpeed's
own accessors give them.
"""

import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[2] / "jobs"))

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
)
from llama_zero3 import build_model, llama_tiny
from safetensors.torch import save_file

from raydist.config.cli import parse_request

SHAPE = [
    "--model.vocab-size", "277", "--model.hidden-size", "48", "--model.intermediate-size", "80",
    "--model.num-layers", "2", "--data.sequence-length", "32",
]  # fmt: skip


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
        for kind in ("exp_avg", "exp_avg_sq"):
            expected[f"{kind}/{name}"] = safe_get_full_optimizer_state(parameter, kind)
    if rank == 0:
        whole = {k: v.detach().clone().contiguous() for k, v in expected.items()}
        save_file(whole, folder / "expected.safetensors")
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
