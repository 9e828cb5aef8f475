# SPDX-License-Identifier: Apache-2.0
"""Data objects against the safetensors package, and their checksums. Nothing is faked."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import safetensors
from awscrt import checksums
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.checkpoint import objects
from raydist.checkpoint.objects import describe, encode
from raydist.checkpoint.ranges import DTYPE_BYTES, LocalRange, TensorSpec
from raydist.errors import CheckpointError

DTYPES = st.sampled_from(sorted(DTYPE_BYTES))


def local(key: str, dtype: str, offset: int, data: bytes) -> LocalRange:
    length = len(data) // DTYPE_BYTES[dtype]
    spec = TensorSpec(key=key, shape=(offset + length,), dtype=dtype)
    return LocalRange(spec=spec, offset=offset, length=length, data=memoryview(data))


@settings(deadline=None, database=None)
@given(
    items=st.lists(st.tuples(DTYPES, st.integers(0, 40), st.integers(0, 2**45)), max_size=8),
    seed=st.integers(0, 1000),
)
def test_encode_of_any_ranges_is_read_by_the_safetensors_package_with_equal_bytes(
    items: list[tuple[str, int, int]], seed: int
) -> None:
    source = random.Random(seed)
    ranges = [
        local(f"master/layer.{n}.w", dtype, offset, source.randbytes(length * DTYPE_BYTES[dtype]))
        for n, (dtype, length, offset) in enumerate(items)
    ]
    data, stored = encode(ranges)
    read = dict(safetensors.deserialize(bytes(data)))
    assert read.keys() == {f"{item.spec.key}@{item.offset}" for item in ranges}
    for item in ranges:
        tensor = read[f"{item.spec.key}@{item.offset}"]
        assert bytes(tensor["data"]) == bytes(item.data)
        assert (tensor["dtype"], tensor["shape"]) == (item.spec.dtype, [item.length])
        where = stored[item.spec.key]
        assert (where.offset, where.length) == (item.offset, item.length)
        assert data[where.byte_start : where.byte_start + len(item.data)] == item.data


def test_encode_to_a_file_is_opened_by_safe_open_as_arrays(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32)
    mask = np.array([True, False, True])
    data, _ = encode(
        [
            local("buffer/mask", "BOOL", 0, mask.tobytes()),  # 3 bytes: what follows is unaligned
            local("master/w", "F32", 12, values.tobytes()),
        ]
    )
    (tmp_path / "part.safetensors").write_bytes(data)
    with safetensors.safe_open(tmp_path / "part.safetensors", framework="numpy") as file:
        assert np.array_equal(file.get_tensor("master/w@12"), values)
        assert np.array_equal(file.get_tensor("buffer/mask@0"), mask)


def test_encode_of_nothing_is_a_file_without_tensors() -> None:
    data, stored = encode([])
    assert safetensors.deserialize(bytes(data)) == []
    assert stored == {}


def test_encode_starts_data_on_eight_bytes_whatever_the_names() -> None:
    for extra in range(9):
        data, stored = encode([local("w" * (1 + extra), "F32", 0, b"abcd")])
        header_bytes = int.from_bytes(data[:8], "little")
        assert header_bytes % 8 == 0
        assert stored["w" * (1 + extra)].byte_start == 8 + header_bytes
        json.loads(data[8 : 8 + header_bytes])


@pytest.mark.parametrize("num_bytes", [7, 9, 0])
def test_encode_of_a_buffer_of_another_size_names_the_tensor(num_bytes: int) -> None:
    spec = TensorSpec(key="master/w", shape=(2,), dtype="F32")
    item = LocalRange(spec=spec, offset=0, length=2, data=memoryview(bytes(num_bytes)))
    with pytest.raises(CheckpointError, match=r"master/w.*8") as caught:
        encode([item])
    assert str(num_bytes) in str(caught.value)


def test_encode_of_a_buffer_of_floats_lays_out_its_bytes() -> None:
    values = np.arange(3, dtype=np.float32)
    spec = TensorSpec(key="master/w", shape=(3,), dtype="F32")
    data, stored = encode([LocalRange(spec=spec, offset=0, length=3, data=memoryview(values))])
    start = stored["master/w"].byte_start
    assert data[start:] == values.tobytes()


def test_encode_of_two_ranges_of_one_tensor_is_refused() -> None:
    with pytest.raises(CheckpointError, match="master/w"):
        encode([local("master/w", "U8", 0, b"ab"), local("master/w", "U8", 4, b"cd")])


@pytest.mark.parametrize("num_bytes", [0, 1, 99, 100, 101, 399, 400])
def test_describe_gives_the_crc_of_every_block_and_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    monkeypatch.setattr(objects, "_MIN_BLOCK_BYTES", 100)
    data = random.Random(num_bytes).randbytes(num_bytes)
    found = describe("a/key", bytearray(data))
    assert (found.key, found.bytes, found.block_bytes) == ("a/key", num_bytes, 100)
    assert found.crc32c == checksums.crc32c(data)
    blocks = [data[at : at + 100] for at in range(0, num_bytes, 100)]
    assert list(found.blocks) == [checksums.crc32c(block) for block in blocks]


def test_describe_of_a_big_object_doubles_blocks_until_few_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(objects, "_MIN_BLOCK_BYTES", 10)
    monkeypatch.setattr(objects, "_MAX_BLOCKS", 4)
    assert describe("k", bytes(40)).block_bytes == 10
    found = describe("k", bytes(41))
    assert (found.block_bytes, len(found.blocks)) == (20, 3)
    assert describe("k", bytes(1000)).block_bytes == 320


def test_checksum_of_the_known_vector_is_crc32c() -> None:
    assert describe("k", b"123456789").crc32c == 0xE3069283
