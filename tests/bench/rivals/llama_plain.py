# SPDX-License-Identifier: Apache-2.0
"""The default job written the short way: the same model, batches and optimizer, no raydist.

    python llama_plain.py TOKENS STEPS OUT                  # plain Ray Train TorchTrainer
    torchrun --nproc-per-node 2 llama_plain.py TOKENS STEPS OUT   # bare DeepSpeed

TOKENS is a file of uint16 ids (the corpus that raydist prepared); the losses and the time of
every step go to OUT as JSON.
"""

import json
import os
import sys
import time

STARTED = time.time()
LENGTH, GLOBAL_BATCH, WORLD = 128, 16, 2


def train(settings):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import numpy as np
    import torch
    import torch._dynamo  # zero.Init replaces constructors that its import inspects
    from transformers import LlamaConfig, LlamaForCausalLM

    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)
    tokens = np.memmap(settings["tokens"], np.uint16, mode="r")
    samples = len(tokens) // LENGTH
    order = np.random.default_rng(0).permutation(samples)
    times, losses = [], []
    for step in range(settings["steps"]):
        begun = time.perf_counter()
        first = step * GLOBAL_BATCH + rank * GLOBAL_BATCH // WORLD
        rows = order[first : first + GLOBAL_BATCH // WORLD]
        batch = np.stack([tokens[i * LENGTH : (i + 1) * LENGTH] for i in rows]).astype(np.int64)
        ids = torch.from_numpy(batch)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - begun)
        if step == 0:
            first_step_s = time.time() - settings["started"]
    if rank == 0:
        result = {"first_step_s": first_step_s, "step_s": times, "loss": losses}
        with open(settings["out"], "w") as out:
            json.dump(result, out)


def main():
    tokens, steps, out, ds_config = sys.argv[1:5]
    settings = {
        "tokens": tokens,
        "steps": int(steps),
        "out": out,
        "started": STARTED,
        "ds_config": json.loads(ds_config),
    }
    if "RANK" in os.environ:
        return train(settings)
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(address="local", include_dashboard=False)
    TorchTrainer(
        train,
        train_loop_config=settings,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=WORLD),
        run_config=RunConfig(storage_path=os.path.dirname(os.path.abspath(out))),
    ).fit()
    return None


if __name__ == "__main__":
    main()
