# SPDX-License-Identifier: Apache-2.0
"""Index and headers of safetensors directories, whole and damaged. Faked: the disk, as memory."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from huggingface_directory import files, sharded, single, tensors

from raydist.errors import CheckpointCorruptError, ConfigError
from raydist.testing.memory_store import MemoryStore


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("make", [single, sharded])
def test_files_every_tensor_is_found_where_it_lies(make) -> None:
    given = tensors()
    store = make(given)
    found = files(store)
    assert found.tensors.keys() == given.keys()
    for name, tensor in given.items():
        stored = found.tensors[name]
        assert (stored.shape, stored.dtype) == (tuple(tensor.shape), "F32")
        raw = store.get(stored.file, start=stored.byte_start, length=tensor.nbytes)
        assert raw == _bytes(tensor)


def test_files_config_says_whether_weights_are_tied() -> None:
    assert files(single(tensors())).is_tied is None
    assert files(single(tensors(), tie_word_embeddings=True)).is_tied is True
    assert files(single(tensors(), tie_word_embeddings=False)).is_tied is False


def test_files_of_a_header_larger_than_the_first_read_are_read() -> None:
    given = {f"layer.{'x' * 100}.{n}": torch.ones(1) for n in range(2000)}
    assert len(files(single(given)).tensors) == 2000


def test_files_single_file_is_preferred_to_an_index_as_transformers_does() -> None:
    store = single({"a": torch.ones(2)})
    store.put("model.safetensors.index.json", b"not read")
    assert files(store).tensors.keys() == {"a"}


def test_files_of_an_empty_directory_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"neither model.safetensors nor .*index.json at"):
        files(MemoryStore())


@pytest.mark.parametrize(
    "index",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": "../a.safetensors"}}',
        b'{"weight_map": {"a": 7}}',
    ],
)
def test_files_unreadable_index_is_refused(index: bytes) -> None:
    store = MemoryStore()
    store.put("model.safetensors.index.json", index)
    with pytest.raises(ConfigError, match=r"index.json cannot be read"):
        files(store)


def test_files_missing_shard_is_named() -> None:
    store = sharded(tensors())
    store.delete("model-00002-of-00003.safetensors")
    with pytest.raises(CheckpointCorruptError, match=r"model-00002-of-00003.*file is missing"):
        files(store)


def test_files_tensor_that_the_index_promises_in_vain_is_named() -> None:
    store = sharded(tensors())
    index = json.loads(store.get("model.safetensors.index.json"))
    index["weight_map"]["ghost"] = "model-00001-of-00003.safetensors"
    store.put("model.safetensors.index.json", json.dumps(index).encode())
    with pytest.raises(CheckpointCorruptError, match="promises ghost"):
        files(store)


@pytest.mark.parametrize("cut", [0, 4, 8, 40, -1, -100])
def test_files_truncated_file_is_refused_at_any_length(cut: int) -> None:
    store = single(tensors())
    store.put("model.safetensors", store.get("model.safetensors")[:cut])
    with pytest.raises(CheckpointCorruptError, match=r"model.safetensors"):
        files(store)


def test_files_longer_file_is_refused() -> None:
    store = single(tensors())
    store.put("model.safetensors", store.get("model.safetensors") + b"x")
    with pytest.raises(CheckpointCorruptError, match="where its header promises"):
        files(store)


def _with_header(header: object, data: bytes) -> MemoryStore:
    raw = json.dumps(header).encode()
    store = MemoryStore()
    store.put("model.safetensors", struct.pack("<Q", len(raw)) + raw + data)
    return store


def _entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ([], "no header"),
        ({"a": {}}, "no header"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": "ab"}}, "no header"),
        ({"a": _entry(0, 8, [3])}, "has 8 bytes"),
        ({"a": _entry(0, 4, [1]), "b": _entry(0, 8, [2])}, "where 4 is next"),
        ({"a": _entry(4, 8, [1])}, "where 0 is next"),
        ({"a": _entry(8, 0, [2])}, "where 0 is next"),
        ({"a": _entry(0, 8, [-1, -2])}, "where 0 is next"),
        ({"a": _entry(0, 4, [1])}, "where its header promises"),
    ],
)
def test_files_senseless_header_is_refused(header: object, reason: str) -> None:
    with pytest.raises(CheckpointCorruptError, match=reason):
        files(_with_header(header, bytes(8)))
