# SPDX-License-Identifier: Apache-2.0
"""A job whose own code fails; each recipe is one way to fail, and the model carries its name.

python tests/fault/jobs/failing_llama.py raises_value_error
"""

from dataclasses import replace

from raydist import Job, main
from raydist.config import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
)


def raises_value_error():
    """ValueError in the third call of loss_fn, on all ranks."""
    return RunConfig(
        name="raises-value-error",
        num_steps=20,
        model=ModelConfig(
            vocab_size=272,
            hidden_size=64,
            intermediate_size=128,
            num_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
        batch=BatchConfig(global_batch_size=8, micro_batch_size=2),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=1),
        data=DataConfig(source="python-stdlib", sequence_length=64),
    )


def turns_nan():
    """The loss is NaN from the thirteenth call on, which is in step 7."""
    return replace(raises_value_error(), name="turns-nan")


def rank_exits():
    """Rank 1 ends its process in the third call, in every attempt."""
    return replace(raises_value_error(), name="rank-exits")


def build_model(config):
    """Return the causal language model, with what its loss is to do and a count of calls."""
    import transformers

    shape = config.model
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            max_position_embeddings=config.data.sequence_length,
            tie_word_embeddings=shape.tie_embeddings,
            use_cache=False,
        )
    )
    model.failure = config.name
    model.num_calls = 0
    return model


def loss_fn(model, batch):
    """Return the mean next-token cross entropy, until it is time to fail."""
    import os

    import torch

    llama = model.module
    llama.num_calls += 1
    loss = model(input_ids=batch["tokens"], labels=batch["tokens"]).loss
    if llama.failure == "raises-value-error" and llama.num_calls == 3:
        raise ValueError("the third batch is not to my liking")
    if llama.failure == "turns-nan" and llama.num_calls >= 13:
        return loss * float("nan")
    if llama.failure == "rank-exits" and llama.num_calls == 3:
        if torch.distributed.get_rank() == 1:
            os._exit(1)
    return loss


JOB = Job(
    recipes=[raises_value_error, turns_nan, rank_exits], build_model=build_model, loss_fn=loss_fn
)

if __name__ == "__main__":
    raise SystemExit(main(JOB))
