# SPDX-License-Identifier: Apache-2.0
"""Snapshots: the object they are, the memory they keep, the numbers they refuse. Nothing faked."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
import safetensors
from checkpoint_scenario import SPECS, random_state, slice_bytes, wanted_ranges

from raydist.checkpoint.finite import find_nonfinite
from raydist.checkpoint.ranges import DTYPE_BYTES, TensorSpec, WantedRange
from raydist.checkpoint.snapshot import Snapshot, touched_memory
from raydist.errors import CheckpointError

NONFINITE = {
    "F32": [struct.pack("<f", x) for x in (float("inf"), float("-inf"), float("nan"))],
    "F64": [struct.pack("<d", x) for x in (float("inf"), float("-inf"), float("nan"))],
    "F16": [struct.pack("<e", x) for x in (float("inf"), float("-inf"), float("nan"))],
    "BF16": [struct.pack("<f", x)[2:] for x in (float("inf"), float("-inf"), float("nan"))],
}
LARGEST = {
    "F32": struct.pack("<I", 0x7F7FFFFF),
    "F64": struct.pack("<Q", 0x7FEFFFFFFFFFFFFF),
    "F16": struct.pack("<H", 0x7BFF),
    "BF16": struct.pack("<H", 0x7F7F),
}


def fill(snapshot: Snapshot, seed: int) -> dict[str, bytes]:
    state = random_state(seed)
    written = {}
    for item in snapshot.layout.ranges:
        raw = slice_bytes(item.spec, state[item.spec], item.offset, item.length)
        snapshot.views[item.spec.key][:] = raw
        written[f"{item.spec.key}@{item.offset}"] = raw
    return written


@pytest.mark.parametrize("world_size", [1, 3])
def test_snapshot_is_the_safetensors_object_of_its_ranges(world_size: int) -> None:
    for rank in range(world_size):
        snapshot = Snapshot(wanted_ranges(SPECS, rank=rank, world_size=world_size))
        written = fill(snapshot, rank)
        read = dict(safetensors.deserialize(bytes(snapshot.data)))
        assert {key: bytes(tensor["data"]) for key, tensor in read.items()} == written
        for item in snapshot.layout.ranges:
            stored = snapshot.layout.stored[item.spec.key]
            assert (stored.offset, stored.length) == (item.offset, item.length)
            assert stored.byte_start % DTYPE_BYTES[item.spec.dtype] == 0


def test_snapshot_of_a_second_save_is_in_the_memory_of_the_first() -> None:
    made: list[memoryview] = []

    def allocate(num_bytes: int) -> memoryview:
        made.append(touched_memory(num_bytes))
        return made[-1]

    snapshot = Snapshot(wanted_ranges(SPECS, rank=0, world_size=2), allocate=allocate)
    for seed in (1, 2, 3):
        written = fill(snapshot, seed)
        read = dict(safetensors.deserialize(bytes(made[0])))
        assert {key: bytes(tensor["data"]) for key, tensor in read.items()} == written
    assert len(made) == 1
    assert len(made[0]) == snapshot.layout.bytes


def test_snapshot_with_two_ranges_of_a_tensor_is_refused() -> None:
    ranges = wanted_ranges(SPECS[:1], rank=0, world_size=2)
    with pytest.raises(CheckpointError, match="one rank saves two ranges"):
        Snapshot([*ranges, *ranges])


def test_snapshot_that_is_not_finite_names_the_tensor_and_the_element() -> None:
    spec = TensorSpec(key="exp_avg/w", shape=(100,), dtype="F32")
    snapshot = Snapshot([WantedRange(spec=spec, offset=40, length=20)])
    snapshot.check_finite()
    snapshot.views["exp_avg/w"][4 * 3 : 4 * 4] = NONFINITE["F32"][2]
    with pytest.raises(CheckpointError, match="exp_avg/w is not finite in element 43"):
        snapshot.check_finite()


@pytest.mark.parametrize("dtype", sorted(NONFINITE))
def test_every_kind_of_nonfinite_number_is_found_wherever_it_is(dtype: str) -> None:
    width, count = DTYPE_BYTES[dtype], 3 * (1 << 20) + 17
    data = bytearray(LARGEST[dtype] * count)  # their sum overflows, each of them is finite
    assert find_nonfinite(memoryview(data), dtype) is None
    source = random.Random(0)
    for bad in NONFINITE[dtype]:
        for at in (0, count - 1, source.randrange(count)):
            data[at * width : (at + 1) * width] = bad
            assert find_nonfinite(memoryview(data), dtype) == at
            data[at * width : (at + 1) * width] = LARGEST[dtype]


@pytest.mark.parametrize("dtype", ["I64", "I32", "U8", "BOOL"])
def test_integers_are_finite_whatever_their_bits(dtype: str) -> None:
    assert find_nonfinite(memoryview(b"\xff" * 64), dtype) is None


def test_no_numbers_are_finite() -> None:
    assert find_nonfinite(memoryview(b""), "F32") is None


def test_touched_memory_is_writable_zeroes() -> None:
    memory = touched_memory(3 * 4096 + 5)
    assert not np.frombuffer(memory, np.uint8).any()
    memory[-1] = 1
    assert memory[-1] == 1
