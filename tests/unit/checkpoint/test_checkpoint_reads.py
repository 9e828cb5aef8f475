# SPDX-License-Identifier: Apache-2.0
"""The plan of a restore's reads, and what a read verifies. Real: MemoryStore. Nothing is faked."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from checkpoint_scenario import Fault, State, WatchedStore, local_ranges, random_state
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.checkpoint import objects, reads
from raydist.checkpoint.manifest import Manifest, Progress
from raydist.checkpoint.objects import describe, encode
from raydist.checkpoint.ranges import DTYPE_BYTES, TensorSpec, WantedRange
from raydist.checkpoint.reads import plan_reads, read_spans, verify_object
from raydist.errors import CheckpointCorruptError, CheckpointError, StorageError
from raydist.testing.memory_store import MemoryStore


def saved(
    store: MemoryStore | WatchedStore, state: State, *, world_size: int, block_bytes: int
) -> Manifest:
    """Put the objects of a world and return their manifest."""
    tensors: dict[str, TensorSpec] = {}
    ranges: dict[str, list] = {}
    infos = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "_MIN_BLOCK_BYTES", block_bytes)
        for rank in range(world_size):
            items = local_ranges(state, rank=rank, world_size=world_size)
            data, stored = encode(items)
            store.put(f"rank-{rank}", bytes(data))
            infos.append(describe(f"rank-{rank}", data))
            for item in items:
                tensors[item.spec.key] = item.spec
                ranges.setdefault(item.spec.key, []).append((rank, stored[item.spec.key]))
    manifest = Manifest(
        run="toy",
        attempt=1,
        world_size=world_size,
        strategy="ddp",
        precision="fp32",
        config_hash="",
        corpus="",
        created_unix_s=0.0,
        versions={},
        progress=Progress(step=70, data_position=0, epoch=0, tokens=0, skipped_steps=0),
        scalars={},
        tensors=tensors,
        objects=tuple(infos),
        ranges={key: tuple(stored) for key, stored in ranges.items()},
    )
    manifest.check()
    return manifest


def buffers_for(wanted: list[WantedRange]) -> dict[str, memoryview]:
    return {w.spec.key: memoryview(bytearray(w.length * DTYPE_BYTES[w.spec.dtype])) for w in wanted}


SPECS = tuple(
    TensorSpec(key=f"master/t{n}", shape=(size,), dtype=dtype)
    for n, (size, dtype) in enumerate(
        [(100, "F32"), (3, "U8"), (57, "BF16"), (0, "F32"), (31, "F64"), (1, "BOOL"), (200, "F16")]
    )
)


@settings(deadline=None, database=None, max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    world_size=st.integers(1, 4),
    block_bytes=st.sampled_from([8, 64, 1000, 1 << 20]),
    max_span_bytes=st.sampled_from([1, 300, 1 << 20]),
)
def test_reads_of_any_ranges_are_whole_blocks_and_give_exactly_the_wanted_bytes(
    seed: int, world_size: int, block_bytes: int, max_span_bytes: int
) -> None:
    source = random.Random(seed)
    state = random_state(seed, SPECS)
    store = WatchedStore(MemoryStore())
    manifest = saved(store, state, world_size=world_size, block_bytes=block_bytes)
    wanted = []
    for spec in source.sample(SPECS, source.randint(0, len(SPECS))):
        offset = source.randint(0, spec.numel)
        length = source.randint(0, spec.numel - offset)
        wanted.append(WantedRange(spec=spec, offset=offset, length=length))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reads, "_MAX_SPAN_BYTES", max_span_bytes)
        spans = plan_reads(manifest, wanted)
    for span in spans:
        info = manifest.objects[span.object_index]
        end = span.start + span.length
        assert span.start % block_bytes == 0
        assert end % block_bytes == 0 or end == info.bytes
        assert all(span.start <= c.start and c.start + c.length <= end for c in span.copies)
    num_copied = sum(copy.length for span in spans for copy in span.copies)
    assert num_copied == sum(w.length * DTYPE_BYTES[w.spec.dtype] for w in wanted)

    store.requests.clear()
    buffers = buffers_for(wanted)
    num_read = read_spans(store, manifest, spans, buffers)
    for w in wanted:
        width = DTYPE_BYTES[w.spec.dtype]
        expected = state[w.spec][w.offset * width : (w.offset + w.length) * width]
        assert bytes(buffers[w.spec.key]) == expected
    assert len(store.requests) == len(spans)
    assert num_read == sum(r.num_bytes for r in store.requests) == sum(s.length for s in spans)


def test_reads_of_all_tensors_are_one_request_an_object() -> None:
    state = random_state(1, SPECS)
    manifest = saved(MemoryStore(), state, world_size=3, block_bytes=16)
    whole = [WantedRange(spec=spec, offset=0, length=spec.numel) for spec in SPECS]
    spans = plan_reads(manifest, whole)
    assert [span.object_index for span in spans] == [0, 1, 2]


def test_reads_of_tensors_far_apart_leave_out_what_is_between() -> None:
    specs = [TensorSpec(key=f"t{n}", shape=(1000,), dtype="U8") for n in range(3)]
    manifest = saved(MemoryStore(), random_state(1, specs), world_size=1, block_bytes=100)
    wanted = [WantedRange(spec=specs[n], offset=0, length=1000) for n in (0, 2)]
    spans = plan_reads(manifest, wanted)
    assert len(spans) == 2
    assert sum(span.length for span in spans) <= 2 * 1000 + 4 * 100
    assert spans[0].start + spans[0].length <= spans[1].start


def test_reads_within_one_block_are_one_request() -> None:
    spec = TensorSpec(key="t0", shape=(90,), dtype="U8")
    other = TensorSpec(key="t1", shape=(90,), dtype="U8")
    manifest = saved(MemoryStore(), random_state(1, [spec, other]), world_size=1, block_bytes=4096)
    wanted = [WantedRange(spec=s, offset=40, length=2) for s in (spec, other)]
    assert len(plan_reads(manifest, wanted)) == 1


def test_reads_of_nothing_ask_for_nothing() -> None:
    manifest = saved(MemoryStore(), random_state(1, SPECS), world_size=2, block_bytes=100)
    empty = [WantedRange(spec=SPECS[0], offset=50, length=0)]
    assert plan_reads(manifest, empty) == []
    assert read_spans(MemoryStore(), manifest, [], {}) == 0


@pytest.mark.parametrize(
    ("asked", "there"),
    [
        (TensorSpec(key="master/t9", shape=(100,), dtype="F32"), "not there"),
        (TensorSpec(key="master/t0", shape=(10, 10), dtype="F32"), r"\[100\] F32"),
        (TensorSpec(key="master/t0", shape=(101,), dtype="F32"), r"\[100\] F32"),
        (TensorSpec(key="master/t0", shape=(100,), dtype="I32"), r"\[100\] F32"),
    ],
)
def test_reads_of_another_name_shape_or_dtype_name_tensor_and_step(
    asked: TensorSpec, there: str
) -> None:
    manifest = saved(MemoryStore(), random_state(1, SPECS), world_size=2, block_bytes=100)
    with pytest.raises(CheckpointError, match=rf"{asked.key}.*step 70.*{there}") as caught:
        plan_reads(manifest, [WantedRange(spec=asked, offset=0, length=1)])
    assert not isinstance(caught.value, CheckpointCorruptError)
    assert str(list(asked.shape)) in str(caught.value)


@pytest.mark.parametrize(("offset", "length"), [(99, 2), (101, 0), (-1, 2), (0, -1)])
def test_reads_outside_the_tensor_are_refused_rather_than_left_zero(
    offset: int, length: int
) -> None:
    manifest = saved(MemoryStore(), random_state(1, SPECS), world_size=2, block_bytes=100)
    with pytest.raises(CheckpointError, match="master/t0"):
        plan_reads(manifest, [WantedRange(spec=SPECS[0], offset=offset, length=length)])


def test_reads_of_two_ranges_of_one_tensor_are_refused() -> None:
    manifest = saved(MemoryStore(), random_state(1, SPECS), world_size=2, block_bytes=100)
    with pytest.raises(CheckpointError, match="master/t0"):
        plan_reads(manifest, [WantedRange(spec=SPECS[0], offset=at, length=1) for at in (0, 5)])


def test_read_of_a_damaged_block_names_object_and_block() -> None:
    store = MemoryStore()
    manifest = saved(store, random_state(1, SPECS), world_size=1, block_bytes=100)
    info = manifest.objects[0]
    good = store.get(info.key)
    spans = plan_reads(manifest, [WantedRange(spec=s, offset=0, length=s.numel) for s in SPECS])
    at = info.bytes - 150
    for damaged, reason in [
        (good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :], f"block {at // 100} "),
        (good[:-1], f"{info.bytes} in all"),
        (b"", "0 bytes at"),
    ]:
        store.put(info.key, damaged)
        buffers = buffers_for([WantedRange(spec=s, offset=0, length=s.numel) for s in SPECS])
        with pytest.raises(CheckpointCorruptError, match=reason) as caught:
            read_spans(store, manifest, spans, buffers)
        assert caught.value.key == info.key
        with pytest.raises(CheckpointCorruptError, match=info.key):
            verify_object(store, info)
    store.delete(info.key)
    with pytest.raises(CheckpointCorruptError, match="is missing"):
        read_spans(store, manifest, spans, {})
    with pytest.raises(CheckpointCorruptError, match="is missing"):
        verify_object(store, info)


def test_read_of_damage_elsewhere_in_the_object_is_not_refused() -> None:
    store = MemoryStore()
    specs = [TensorSpec(key=f"t{n}", shape=(1000,), dtype="U8") for n in range(3)]
    state = random_state(1, specs)
    manifest = saved(store, state, world_size=1, block_bytes=100)
    raw = bytearray(store.get("rank-0"))
    raw[-1] ^= 1
    store.put("rank-0", raw)
    wanted = [WantedRange(spec=specs[0], offset=0, length=1000)]
    buffers = buffers_for(wanted)
    read_spans(store, manifest, plan_reads(manifest, wanted), buffers)
    assert bytes(buffers["t0"]) == state[specs[0]]


def test_read_that_the_store_fails_is_no_proof_of_damage() -> None:
    store = WatchedStore(MemoryStore(), Fault(operation="get", part="rank-1"))
    manifest = saved(store, random_state(1, SPECS), world_size=2, block_bytes=100)
    wanted = [WantedRange(spec=SPECS[0], offset=0, length=100)]
    with pytest.raises(StorageError, match="injected"):
        read_spans(store, manifest, plan_reads(manifest, wanted), buffers_for(wanted))


@pytest.mark.parametrize("max_span_bytes", [1, 250, 1 << 20])
def test_verify_of_a_sound_object_reads_it_once_in_whole_blocks(
    monkeypatch: pytest.MonkeyPatch, max_span_bytes: int
) -> None:
    monkeypatch.setattr(reads, "_MAX_SPAN_BYTES", max_span_bytes)
    store = WatchedStore(MemoryStore())
    manifest = saved(store, random_state(1, SPECS), world_size=1, block_bytes=100)
    store.requests.clear()
    verify_object(store, manifest.objects[0])
    assert sum(r.num_bytes for r in store.requests) == manifest.objects[0].bytes
    with pytest.raises(CheckpointCorruptError, match="committed"):
        verify_object(store, replace(manifest.objects[0], bytes=5))
