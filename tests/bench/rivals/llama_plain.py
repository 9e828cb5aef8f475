# SPDX-License-Identifier: Apache-2.0
"""The default job written the short way: same model, batches, order and optimizer, no raydist.

    python llama_plain.py SETTINGS.json                           # plain Ray Train TorchTrainer
    torchrun --nproc-per-node 2 llama_plain.py SETTINGS.json      # bare DeepSpeed

SETTINGS: tokens (file of uint16 ids), order (.npy of sample indices), steps, ds_config, out.
Rank 0 writes the loss, time and end of every step to `out`.
"""

import json
import os
import sys
import time

LENGTH, GLOBAL_BATCH, WORLD = 128, 16, 2


def train(settings):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    rank = int(os.environ["RANK"])
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    ds_config = settings["ds_config"]
    with deepspeed.zero.Init(config_dict_or_path=ds_config):
        model = LlamaForCausalLM(config)
    matrices = [p for p in model.parameters() if len(p.ds_shape) >= 2]
    others = [p for p in model.parameters() if len(p.ds_shape) < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=3e-3,
        betas=(0.9, 0.95),
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)
    tokens = np.memmap(settings["tokens"], np.uint16, mode="r")
    order = np.load(settings["order"])
    rows = []
    for step in range(settings["steps"]):
        begun = time.perf_counter()
        first = step * GLOBAL_BATCH + rank * GLOBAL_BATCH // WORLD
        indices = order[first : first + GLOBAL_BATCH // WORLD]
        batch = np.stack([tokens[i * LENGTH : (i + 1) * LENGTH] for i in indices])
        ids = torch.from_numpy(batch.astype(np.int64))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        value = loss.item()
        rows.append(
            {"loss": value, "step_time_s": time.perf_counter() - begun, "unix_s": time.time()}
        )
    if rank == 0:
        with open(settings["out"], "w") as out:
            json.dump(rows, out)


def main():
    with open(sys.argv[1]) as file:
        settings = json.load(file)
    if "RANK" in os.environ:
        train(settings)
        return
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(address="local", include_dashboard=False)
    TorchTrainer(
        train,
        train_loop_config=settings,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=WORLD),
        run_config=RunConfig(storage_path=os.path.dirname(settings["out"])),
    ).fit()


if __name__ == "__main__":
    main()
