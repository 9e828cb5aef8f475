# SPDX-License-Identifier: Apache-2.0
"""Llama pre-training: Ray Train's TorchTrainer x DeepSpeed ZeRO-3 x Ray Data.

python jobs/llama_zero3.py                           # this machine
python jobs/llama_zero3.py llama3_8b --dry-run       # the plan: no GPU, no cluster, no weights
ray job submit --working-dir . -- python jobs/llama_zero3.py llama3_8b --storage s3://b/runs
torchrun --nproc-per-node 2 jobs/llama_zero3.py      # the same ranks without Ray
"""

from raydist import Job, main
from raydist.config import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScalingConfig,
    ZeroConfig,
)


def llama_tiny():
    """3M parameters on 2 CPU ranks or the GPUs that are there: the standard library, as bytes."""
    return RunConfig(
        name="llama-tiny",
        num_steps=240,
        model=ModelConfig(
            vocab_size=272,
            hidden_size=256,
            intermediate_size=704,
            num_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
        batch=BatchConfig(global_batch_size=16, micro_batch_size=8),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20),
        data=DataConfig(source="python-stdlib", sequence_length=128),
        checkpoint=CheckpointConfig(every_steps=100),
    )


def llama3_8b():
    """Llama-3-8B on 8 x 80 GB; 256 x 8192 = 2 Mi tokens per optimizer step."""
    return RunConfig(
        name="llama3-8b",
        num_steps=100_000,
        activation_checkpointing=True,
        model=ModelConfig(
            vocab_size=128_256,
            hidden_size=4096,
            intermediate_size=14_336,
            num_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            rope_theta=500_000.0,
        ),
        batch=BatchConfig(global_batch_size=256, micro_batch_size=1),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
        data=DataConfig(source="python-stdlib", sequence_length=8192),
        checkpoint=CheckpointConfig(every_steps=500),
        scaling=ScalingConfig(workers=8, plan_device="H100-80G"),
    )


def llama3_70b():
    """Llama-3-70B on 8 nodes x 8 x 80 GB; 512 x 8192 = 4 Mi tokens per optimizer step."""
    return RunConfig(
        name="llama3-70b",
        num_steps=100_000,
        activation_checkpointing=True,
        model=ModelConfig(
            vocab_size=128_256,
            hidden_size=8192,
            intermediate_size=28_672,
            num_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            rope_theta=500_000.0,
        ),
        batch=BatchConfig(global_batch_size=512, micro_batch_size=1),
        optimizer=OptimizerConfig(learning_rate=1.5e-4, warmup_steps=2000),
        data=DataConfig(source="python-stdlib", sequence_length=8192),
        checkpoint=CheckpointConfig(every_steps=500),
        scaling=ScalingConfig(nodes=8, gpus_per_node=8, plan_device="H100-80G"),
    )


def qwen2_72b():
    """Qwen2-72B on 2 nodes x 8 x 80 GB, optimizer on the hosts; 2 Mi tokens per step."""
    return RunConfig(
        name="qwen2-72b",
        num_steps=100_000,
        activation_checkpointing=True,
        model=ModelConfig(
            architecture="qwen2",
            vocab_size=152_064,
            hidden_size=8192,
            intermediate_size=29_568,
            num_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            rope_theta=1_000_000.0,
        ),
        batch=BatchConfig(global_batch_size=512, micro_batch_size=1),
        optimizer=OptimizerConfig(learning_rate=1.5e-4, warmup_steps=2000),
        data=DataConfig(source="python-stdlib", sequence_length=4096),
        checkpoint=CheckpointConfig(every_steps=500),
        zero=ZeroConfig(offload_optimizer="cpu"),
        scaling=ScalingConfig(nodes=2, gpus_per_node=8, plan_device="H100-80G"),
    )


def build_model(config):
    """Return the causal language model; under ZeRO-3 its parameters are born partitioned."""
    import transformers

    from raydist.config.huggingface import transformers_arguments

    shape = config.model
    family = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }
    config_type, model_type = family[shape.architecture]
    arguments = transformers_arguments(shape, max_positions=config.data.sequence_length)
    model = model_type(config_type(**arguments, use_cache=False))
    if config.activation_checkpointing:
        model.activation_checkpointing_enable()
    return model


def loss_fn(model, batch):
    """Return the mean next-token cross entropy of `tokens`, int64 [micro_batch, sequence]."""
    return model(input_ids=batch["tokens"], labels=batch["tokens"]).loss


def sample(model, config):
    """Let the model write on from a definition; every rank runs it, as ZeRO-3 needs."""
    import torch

    prompt = list(b"def ")
    device = next(model.parameters()).device
    tokens = torch.tensor([prompt], device=device)
    generator = torch.Generator(device="cpu").manual_seed(config.seed)
    model.eval()
    with torch.no_grad():
        for _ in range(config.metrics.sample_tokens):
            window = tokens[:, -config.data.sequence_length :]
            logits = model(input_ids=window).logits[0, -1, :256].float().cpu()
            probabilities = torch.softmax(logits / 0.7, dim=-1)
            token = torch.multinomial(probabilities, 1, generator=generator)
            tokens = torch.cat([tokens, token[None].to(device)], dim=1)
    model.train()
    return bytes(tokens[0].tolist()).decode(errors="replace")


JOB = Job(
    recipes=[llama_tiny, llama3_8b, llama3_70b, qwen2_72b],
    build_model=build_model,
    loss_fn=loss_fn,
    sample=sample,
)

if __name__ == "__main__":
    raise SystemExit(main(JOB))
