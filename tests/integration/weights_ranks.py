"""Load Hugging Face directories into engines and compare with from_pretrained; run by torchrun.

    torchrun --nproc-per-node W weights_ranks.py STRATEGY PRECISION OUT NAME=DIRECTORY...

The names say what is done; rank 0 writes {name: findings} to OUT.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

from raydist.train.environment import quiet_libraries, select_accelerator

select_accelerator()
quiet_libraries()

import torch  # noqa: E402
import transformers  # noqa: E402

from raydist.config import (  # noqa: E402
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
)
from raydist.errors import RaydistError  # noqa: E402
from raydist.train.initial_weights import load_initial_weights  # noqa: E402
from raydist.train.job import Job  # noqa: E402
from raydist.train.rendezvous import (  # noqa: E402
    TorchGroup,
    choose_device,
    join,
    world_from_environment,
)
from raydist.world import plan_batch  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "jobs"))
from llama_zero3 import build_model, loss_fn  # noqa: E402

LENGTH = 32


def config_for(directory, strategy, precision, **changes):
    """The run that the directory's config.json asks for, apart from ``changes``."""
    document = json.loads(Path(directory, "config.json").read_text())
    model = ModelConfig(
        architecture=document["model_type"],
        vocab_size=document["vocab_size"],
        hidden_size=document["hidden_size"],
        intermediate_size=document["intermediate_size"],
        num_layers=document["num_hidden_layers"],
        num_attention_heads=document["num_attention_heads"],
        num_key_value_heads=document["num_key_value_heads"],
        rope_theta=document["rope_parameters"]["rope_theta"],
        rms_norm_eps=document["rms_norm_eps"],
        tie_embeddings=document["tie_word_embeddings"],
        weights=str(directory),
    )
    return RunConfig(
        name="weights",
        num_steps=10,
        seed=5,
        strategy=strategy,
        precision=precision,
        model=dataclasses.replace(model, **changes),
        batch=BatchConfig(global_batch_size=12, micro_batch_size=1),
        optimizer=OptimizerConfig(learning_rate=0.01),
        data=DataConfig(source="x", sequence_length=LENGTH),
    )


def engine_for(config, world, device):
    plan = plan_batch(global_batch_size=12, micro_batch_size=1, world_size=world.world_size)
    job = Job(recipes=[lambda: config], build_model=build_model, loss_fn=loss_fn)
    if config.strategy == "zero3":
        from raydist.train.zero import ZeroEngine as Engine
    else:
        from raydist.train.ddp import DdpEngine as Engine
    return Engine(job, config, plan, device)


def logits_of(model, tokens):
    model.eval()
    with torch.no_grad():
        return model(input_ids=tokens).logits.float().cpu()


def embedding(engine, strategy):
    """The model's input embedding, whole."""
    named = engine.model.named_parameters()
    weight = next(p for name, p in named if name.endswith("embed_tokens.weight"))
    if strategy != "zero3":
        return weight.detach().cpu().clone()
    import deepspeed

    with deepspeed.zero.GatheredParameters([weight]):
        return weight.detach().cpu().clone()


def compare(directory, strategy, precision, group, world, device):
    config = config_for(directory, strategy, precision)
    engine = engine_for(config, world, device)
    tokens = torch.randint(257, (2, LENGTH), generator=torch.Generator().manual_seed(1)).to(device)
    before = logits_of(engine.model, tokens)
    said = load_initial_weights(engine, config.model, where=str(directory), group=group)
    after = logits_of(engine.model, tokens)
    dtype = torch.bfloat16 if precision == "bf16" and strategy == "zero3" else torch.float32
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    expected = logits_of(reference.to(device), tokens)
    # zero.Init has buffers computed in bf16, the rotary frequencies among them; transformers not.
    buffers = {n.removeprefix("module."): b for n, b in engine.model.named_buffers()}
    for name, module in reference.named_modules():
        for own in module._buffers:
            module._buffers[own] = buffers[f"{name}.{own}"]
    with_buffers = logits_of(reference, tokens)
    return {
        "said": said,
        "equal_but_for_buffers": torch.equal(after, with_buffers),
        "equal": torch.equal(after, expected),
        "error": (after - expected).abs().max().item(),
        "spread": expected.std().item(),
        "before": (before - expected).abs().max().item(),
    }


def resize(directory, strategy, precision, group, world, device):
    rows = 283
    config = config_for(directory, strategy, precision, vocab_size=rows)
    engine = engine_for(config, world, device)
    before = embedding(engine, strategy)
    said = load_initial_weights(engine, config.model, where=str(directory), group=group)
    after = embedding(engine, strategy)
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    there = reference.get_input_embeddings().weight.detach()
    return {
        "said": said,
        "copied": torch.equal(after[: len(there)], there),
        "kept": torch.equal(after[len(there) :], before[len(there) :]),
        "added": rows - len(there),
    }


def refuse(directory, strategy, precision, group, world, device, **changes):
    config = config_for(directory, strategy, precision, **changes)
    engine = engine_for(config, world, device)
    try:
        load_initial_weights(engine, config.model, where=str(directory), group=group)
        mine = "nothing was refused"
    except RaydistError as error:
        mine = f"{type(error).__name__}: {error}"
    return {"said": group.broadcast(group.gather(mine))}


def main():
    strategy, precision, out, *cases = sys.argv[1:]
    world = world_from_environment(os.environ)
    os.environ["LOCAL_SIZE"] = str(world.local_world_size)
    device = choose_device(world)
    join(world, device=device, store=None, timeout_s=60, with_deepspeed=strategy == "zero3")
    group = TorchGroup(60)
    found = {}
    for case in cases:
        name, directory = case.split("=")
        action = {"resize": resize, "refuse": refuse}.get(name.split("-")[0], compare)
        found[name] = action(directory, strategy, precision, group, world, device)
    if world.is_main:
        Path(out).write_text(json.dumps(found))
    group.broadcast(None)
    os._exit(0)  # as a rank does: gloo threads may abort the interpreter while it ends


if __name__ == "__main__":
    main()
