# SPDX-License-Identifier: Apache-2.0
"""Memory plans, by hand and by law. Real: what autograd saves in transformers, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from raydist.config import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ZeroConfig,
)
from raydist.errors import ConfigError
from raydist.plan import (
    DEVICES,
    MemoryPlan,
    advise,
    get_device,
    plan_memory,
    render_plan,
    smallest_world_that_fits,
)
from raydist.plan.memory import activation_bytes_per_block

A800 = DEVICES["A800-80G"]
PARAMETERS_8B = 8_030_261_248

MODELS = {
    "8b": ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    # No dimension that many world sizes divide.
    "odd": ModelConfig(
        architecture="qwen2",
        vocab_size=263,
        hidden_size=66,
        intermediate_size=171,
        num_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
    ),
}


def run_config(model: str = "8b", **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "name": "plan",
        "num_steps": 10,
        "model": MODELS[model],
        "batch": BatchConfig(global_batch_size=64, micro_batch_size=1),
        "optimizer": OptimizerConfig(learning_rate=1e-4),
        "data": DataConfig(source="python-stdlib", sequence_length=4096),
    }
    return RunConfig(**values | changes)


def plan(config: RunConfig, world_size: int = 8, device: str = "A800-80G") -> MemoryPlan:
    return plan_memory(config, world_size=world_size, device=get_device(device))


def states(memory: MemoryPlan, place: str) -> dict[str, int]:
    return {p.kind: p.size_bytes for p in memory.parts if p.place == place and p.phase == "states"}


def test_zero3_8b_on_8_is_sixteen_bytes_in_eight_parts() -> None:
    memory = plan(run_config())
    part = PARAMETERS_8B // 8
    assert states(memory, "device") == {
        "parameters": 2 * part,
        "gradients": 2 * part,
        "master weights": 4 * part,
        "optimizer moments": 8 * part,
    }
    assert memory.state_bytes() == 16 * PARAMETERS_8B // 8 == 16_060_522_496  # 14.96 GiB
    assert states(memory, "host") == {}


def test_ddp_8b_is_sixteen_bytes_on_every_rank() -> None:
    for world_size in (1, 8):
        memory = plan(run_config(strategy="ddp"), world_size)
        assert memory.state_bytes() == 16 * PARAMETERS_8B  # 128.5 GB
        assert not memory.fits(A800)


def test_zero3_fp32_keeps_a_second_copy_of_the_weights() -> None:
    """Measured on deepspeed 0.19.8 with 2 gloo ranks: parameters and master weights both lie."""
    memory = plan(run_config(precision="fp32"))
    assert states(memory, "device")["master weights"] == 4 * PARAMETERS_8B // 8
    assert memory.state_bytes() == 20 * PARAMETERS_8B // 8


def test_zero3_offloaded_optimizer_leaves_parameters_only() -> None:
    memory = plan(run_config(zero=ZeroConfig(offload_optimizer="cpu")))
    part = PARAMETERS_8B // 8
    assert states(memory, "device") == {"parameters": 2 * part}
    assert states(memory, "host") == {
        "gradients": 2 * part,
        "fp32 gradients": 4 * part,
        "master weights": 4 * part,
        "optimizer moments": 8 * part,
    }


def test_zero3_all_offloaded_leaves_no_state_on_the_device() -> None:
    zero = ZeroConfig(offload_optimizer="cpu", offload_parameters="cpu")
    memory = plan(run_config(zero=zero))
    assert memory.state_bytes("device") == 0
    assert memory.state_bytes("host") == 20 * PARAMETERS_8B // 8


def test_fp32_gradient_sums_cost_two_bytes_more() -> None:
    zero = ZeroConfig(extra={"data_types": {"grad_accum_dtype": "fp32"}})
    assert plan(run_config(zero=zero)).state_bytes() == 18 * PARAMETERS_8B // 8


def test_padding_is_counted_in_every_tensor() -> None:
    one, many = plan(run_config("odd"), 1), plan(run_config("odd"), 5)
    assert many.state_bytes() * 5 > one.state_bytes()


def test_checkpoint_is_twelve_bytes_a_parameter() -> None:
    for strategy in ("zero3", "ddp"):
        memory = plan(run_config(strategy=strategy))
        assert memory.checkpoint_bytes == 12 * PARAMETERS_8B
        assert memory.checkpoint_bytes_per_rank == 12 * PARAMETERS_8B // 8


def test_logits_8b_hand_figure() -> None:
    """4096 x 128256 x (bf16 + two fp32); the first two are the 1.05 and 2.1 GB of A4."""
    parts = {p.kind: p.size_bytes for p in plan(run_config()).parts}
    assert parts["logits"] == 4096 * 128256 * 10 == 5_253_365_760


def test_peak_is_states_kept_and_the_larger_moment() -> None:
    memory = plan(run_config())
    sums = {phase: memory.total_bytes("device", phase) for phase in ("backward", "step")}  # type: ignore[arg-type]
    kept = memory.total_bytes("device", "states", "always")
    assert memory.peak_bytes() == kept + max(sums.values())
    assert memory.peak_bytes() > memory.state_bytes()


VARIANTS = [
    run_config(model, precision=precision, zero=zero)
    for model, precision, zero in product(
        MODELS,
        ("bf16", "fp32"),
        (
            ZeroConfig(),
            ZeroConfig(offload_optimizer="cpu"),
            ZeroConfig(offload_parameters="cpu"),
            ZeroConfig(offload_optimizer="cpu", offload_parameters="cpu"),
        ),
    )
]


@pytest.mark.parametrize("config", VARIANTS)
def test_more_ranks_never_need_more_on_any_rank(config: RunConfig) -> None:
    plans = [plan(config, world_size) for world_size in (1, 2, 3, 4, 5, 7, 8, 16, 64, 513)]
    for fewer, more in pairwise(plans):
        for place in ("device", "host"):
            assert more.state_bytes(place) <= fewer.state_bytes(place)
            assert more.peak_bytes(place) <= fewer.peak_bytes(place)
        assert more.checkpoint_bytes_per_rank <= fewer.checkpoint_bytes_per_rank


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("device", ["A800-80G", "cpu"])
def test_offload_never_raises_device_memory(
    model: str, precision: Any, world_size: int, device: str
) -> None:
    none, optimizer, both = (
        plan(run_config(model, precision=precision, zero=zero), world_size, device)
        for zero in (
            ZeroConfig(),
            ZeroConfig(offload_optimizer="cpu"),
            ZeroConfig(offload_optimizer="cpu", offload_parameters="cpu"),
        )
    )
    assert both.peak_bytes() <= optimizer.peak_bytes() <= none.peak_bytes()
    assert both.state_bytes() <= optimizer.state_bytes() <= none.state_bytes()


def test_longer_sequences_and_larger_micro_batches_need_more() -> None:
    short = plan(run_config())
    data = DataConfig(source="python-stdlib", sequence_length=8192)
    batch = BatchConfig(global_batch_size=64, micro_batch_size=2)
    assert plan(run_config(data=data)).peak_bytes() > short.peak_bytes()
    assert plan(run_config(batch=batch)).peak_bytes() == plan(run_config(data=data)).peak_bytes()


@pytest.mark.parametrize("mode", ["bf16", "fp32", "autocast"])
@pytest.mark.parametrize("num_key_value_heads", [8, 2])
def test_activations_of_a_block_are_what_autograd_saves(
    mode: str, num_key_value_heads: int
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = ModelConfig(
        vocab_size=264,
        hidden_size=256,
        intermediate_size=704,
        num_layers=1,
        num_attention_heads=8,
        num_key_value_heads=num_key_value_heads,
    )

    def saved_bytes(num_layers: int) -> int:
        built = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=model.vocab_size,
                hidden_size=model.hidden_size,
                intermediate_size=model.intermediate_size,
                num_hidden_layers=num_layers,
                num_attention_heads=model.num_attention_heads,
                num_key_value_heads=model.num_key_value_heads,
            )
        ).to(torch.bfloat16 if mode == "bf16" else torch.float32)
        weights = {p.untyped_storage().data_ptr() for p in built.parameters()}
        saved: dict[int, Any] = {}

        def pack(tensor: Any) -> Any:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage
            return tensor

        tokens = torch.zeros((2, 128), dtype=torch.int64)
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "autocast"),
        ):
            outputs = built(input_ids=tokens, labels=tokens)
        total = sum(storage.nbytes() for storage in saved.values())
        del outputs
        return total

    config = run_config(
        model="8b",
        precision="fp32" if mode == "fp32" else "bf16",
        strategy="ddp" if mode == "autocast" else "zero3",
    )
    expected = activation_bytes_per_block(replace(config, model=model), tokens=256)
    if mode == "autocast":  # the copies that the plan counts as bf16 weight copies
        head = model.hidden_size // model.num_attention_heads
        narrow = head * num_key_value_heads
        expected += 2 * model.hidden_size * (2 * model.hidden_size + 2 * narrow + 3 * 704)
    assert saved_bytes(3) - saved_bytes(2) == expected


def test_fits_compares_the_peak_with_the_device() -> None:
    memory = plan(run_config())
    exact = replace(A800, memory_bytes=memory.peak_bytes())
    assert memory.fits(exact)
    assert not memory.fits(replace(exact, memory_bytes=memory.peak_bytes() - 1))
    assert memory.fits(get_device("cpu"))


def test_fits_on_a_host_counts_both_places() -> None:
    memory = plan(run_config("odd", zero=ZeroConfig(offload_optimizer="cpu")), 2, "cpu")
    both = memory.peak_bytes("device") + memory.peak_bytes("host")
    cpu = get_device("cpu")
    assert memory.fits(replace(cpu, memory_bytes=both))
    assert not memory.fits(replace(cpu, memory_bytes=both - 1))


def test_smallest_world_splits_the_batch_and_is_the_first_that_fits() -> None:
    config = run_config(batch=BatchConfig(global_batch_size=24, micro_batch_size=1))
    found = smallest_world_that_fits(config, A800)
    assert found == 4
    assert not plan(config, 3).fits(A800)
    assert smallest_world_that_fits(replace(config, strategy="ddp"), A800) is None


def test_smallest_world_of_a_batch_that_never_splits_is_none() -> None:
    config = run_config("odd", batch=BatchConfig(global_batch_size=7, micro_batch_size=2))
    assert smallest_world_that_fits(config, A800) is None


def test_advice_names_the_least_offload() -> None:
    assert advise(run_config(), world_size=8, device=A800).offload == "none"
    advice = advise(run_config(), world_size=2, device=A800)
    assert (advice.fits, advice.offload) == (False, "optimizer")
    small = advise(run_config(), world_size=2, device=DEVICES["L4-24G"])
    assert (small.fits, small.smallest_world_size, small.offload) == (False, None, None)


def test_report_tells_states_from_peak_and_gives_ways_out() -> None:
    config = run_config()
    memory = plan(config, 2)
    text = render_plan(memory, device=A800, advice=advise(config, world_size=2, device=A800))
    lines = {line.strip().split("  ")[0]: line.split() for line in text.splitlines()}
    assert lines["states"][1] == "59.83"
    assert float(lines["peak"][1]) > 59.83
    assert "not a measurement" in text
    assert "Does not fit on A800-80G, which has 79.10 GiB." in text
    assert "scaling.workers=4" in text
    assert "zero.offload_optimizer=cpu" in text
    assert "Checkpoint: 89.75 GiB" in text


def test_report_columns_are_aligned() -> None:
    zero = ZeroConfig(offload_optimizer="cpu")
    rows = render_plan(plan(run_config(zero=zero))).splitlines()[1:]
    ends = {len(row) for row in rows if row[-3:-2] == "." and row.startswith("  ")}
    assert ends <= {46, 58}


@pytest.mark.parametrize(
    ("name", "expected"), [("h100", "H100-80G"), ("L4", "L4-24G"), ("A800-80G", "A800-80G")]
)
def test_devices_are_found_by_ray_and_table_name(name: str, expected: str) -> None:
    assert get_device(name).name == expected


def test_unknown_device_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean A100-80G"):
        get_device("A100-80")
    with pytest.raises(ConfigError, match="Known devices"):
        get_device("quantum")


def test_plan_refuses_an_extra_that_deepspeed_would_not_take() -> None:
    with pytest.raises(ConfigError, match="nebula"):
        plan(run_config(zero=ZeroConfig(extra={"nebula": {}})))


def test_plan_has_the_snapshot_of_a_save_in_host_memory_beside_the_rest() -> None:
    for world_size in (1, 8, 48):
        memory = plan(run_config("odd"), world_size=world_size)
        (part,) = [p for p in memory.parts if p.kind == "checkpoint snapshot"]
        assert (part.place, part.phase) == ("host", "always")
        assert part.size_bytes == memory.checkpoint_bytes_per_rank
        assert "checkpoint snapshot" in render_plan(memory)
