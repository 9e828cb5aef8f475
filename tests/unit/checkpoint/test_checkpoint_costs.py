# SPDX-License-Identifier: Apache-2.0
"""How many requests saving and resuming make of the store, and how large their records grow.

Faked: ranks are threads; the store counts. Real: everything in raydist.checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from checkpoint_scenario import SPECS, ToyRun, WatchedStore, random_state, restore_world

from raydist.checkpoint.manifest import Manifest, Progress, decode
from raydist.checkpoint.objects import DataObject, StoredRange
from raydist.checkpoint.ranges import TensorSpec, WantedRange, partition
from raydist.checkpoint.reads import plan_reads
from raydist.checkpoint.runs import read_state
from raydist.testing.memory_store import MemoryStore

BLOCK_BYTES = 1 << 16


@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_save_makes_one_request_a_rank_and_three_more(world_size: int) -> None:
    store = WatchedStore(MemoryStore())
    run = ToyRun(store, world_size=world_size)
    for step in (1, 2, 3):
        store.requests.clear()
        run.save(random_state(step), step)
        parts = [request for request in store.requests if "safetensors" in request.key]
        assert [request.operation for request in parts] == ["put"] * world_size
        others = [request for request in store.requests if request not in parts]
        assert len(others) <= world_size + 4
        assert [(one.operation, one.key.split("/")[-1]) for one in others] == [
            ("put", "manifest.json"),
            ("put", f"{step + 1:08d}.json"),
            ("put", "hint"),
        ]


@pytest.mark.parametrize("num_saves", [1, 5, 40])
def test_resume_is_decided_in_five_requests_without_listing(num_saves: int) -> None:
    inner = MemoryStore()
    run = ToyRun(inner)
    for step in range(1, num_saves + 1):
        run.save(random_state(step), step)
    store = WatchedStore(inner)
    state = read_state(store)
    assert state.step == num_saves
    assert len(store.requests) <= 5
    assert {request.operation for request in store.requests} == {"get"}


def test_restore_of_the_same_world_reads_each_object_once_and_lists_nothing() -> None:
    inner = MemoryStore()
    ToyRun(inner, world_size=3).save(random_state(1), 1)
    store = WatchedStore(inner)
    restore_world(store, 3, SPECS)
    assert {request.operation for request in store.requests} == {"get"}
    parts = [request.key for request in store.requests if "safetensors" in request.key]
    assert len(parts) == len(set(parts)) == 3


# A model and a world too large to run


def llama_70b(num_layers: int) -> Iterator[tuple[str, int]]:
    """Names and elements of Llama-3-70B's tensors, of the first ``num_layers`` layers."""
    hidden, kv, ff, vocab = 8192, 1024, 28672, 128256
    yield "model.embed_tokens.weight", vocab * hidden
    for layer in range(num_layers):
        at = f"model.layers.{layer}."
        for name, numel in {
            "self_attn.q_proj": hidden * hidden,
            "self_attn.k_proj": kv * hidden,
            "self_attn.v_proj": kv * hidden,
            "self_attn.o_proj": hidden * hidden,
            "mlp.gate_proj": ff * hidden,
            "mlp.up_proj": ff * hidden,
            "mlp.down_proj": ff * hidden,
            "input_layernorm": hidden,
            "post_attention_layernorm": hidden,
        }.items():
            yield f"{at}{name}.weight", numel
    yield "model.norm.weight", hidden
    yield "lm_head.weight", vocab * hidden


def zero3_manifest(world_size: int, num_layers: int) -> Manifest:
    """What ``world_size`` ranks under ZeRO-3 would commit, block checksums made up."""
    specs = [
        TensorSpec(key=f"{kind}/{name}", shape=(numel,), dtype="F32")
        for name, numel in llama_70b(num_layers)
        for kind in ("master", "exp_avg", "exp_avg_sq")
    ]
    ranges: dict[str, list[tuple[int, StoredRange]]] = {spec.key: [] for spec in specs}
    objects = []
    for rank in range(world_size):
        # A header grows with the digits of its offsets, as safetensors' does.
        slices = [partition(spec.numel, world_size=world_size, rank=rank) for spec in specs]
        at = sum(100 + len(str(offset)) for offset, _ in slices) // 8 * 8
        for spec, (offset, length) in zip(specs, slices, strict=True):
            stored = StoredRange(offset=offset, length=length, byte_start=at)
            ranges[spec.key].append((rank, stored))
            at += 4 * length
        num_blocks = -(-at // BLOCK_BYTES)
        objects.append(
            DataObject(
                key=f"rank-{rank:05d}",
                bytes=at,
                crc32c=rank,
                block_bytes=BLOCK_BYTES,
                blocks=range(num_blocks),
            )
        )
    return Manifest(
        run="large",
        attempt=1,
        world_size=world_size,
        strategy="zero3",
        precision="bf16",
        config_hash="",
        corpus="",
        created_unix_s=0.0,
        versions={},
        progress=Progress(step=1, data_position=0, epoch=0, tokens=0, skipped_steps=0),
        scalars={},
        tensors={spec.key: spec for spec in specs},
        objects=tuple(objects),
        ranges={key: tuple(stored) for key, stored in ranges.items()},
    )


def test_manifest_of_a_thousand_ranks_grows_with_the_state_and_hardly_with_the_ranks() -> None:
    sizes: dict[int, int] = {}
    for world_size in (256, 1024):
        manifest = zero3_manifest(world_size, num_layers=4)
        raw = manifest.encode()
        sizes[world_size] = len(raw)
        read = decode(raw, where="here")
        assert read.ranges == manifest.ranges
        assert [list(o.blocks) for o in read.objects] == [list(o.blocks) for o in manifest.objects]
    state_bytes = 12 * sum(numel for _, numel in llama_70b(4))
    assert sizes[1024] < state_bytes / 10_000
    assert sizes[1024] < 1.1 * sizes[256]


@pytest.mark.parametrize(("world_size", "next_world_size"), [(16, 16), (16, 12), (64, 48), (8, 16)])
def test_resharded_reads_are_within_two_percent_of_the_state(
    world_size: int, next_world_size: int
) -> None:
    manifest = zero3_manifest(world_size, num_layers=4)
    num_wanted = num_read = 0
    for rank in range(next_world_size):
        wanted = [
            WantedRange(spec=spec, offset=offset, length=length)
            for spec in manifest.tensors.values()
            for offset, length in [partition(spec.numel, world_size=next_world_size, rank=rank)]
        ]
        num_wanted += sum(4 * one.length for one in wanted)
        num_read += sum(span.length for span in plan_reads(manifest, wanted))
    assert num_wanted == 12 * sum(numel for _, numel in llama_70b(4))
    assert num_wanted <= num_read <= 1.02 * num_wanted
