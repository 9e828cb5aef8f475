# SPDX-License-Identifier: Apache-2.0
"""Objects written from beginning to end, and weights read from where they then lie.

Real: the local filesystem, SeaweedFS over loopback as S3, the safetensors package.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from raydist.checkpoint.huggingface_files import read_weight_files
from raydist.checkpoint.huggingface_match import match_tensors
from raydist.checkpoint.huggingface_reads import plan_weight_reads, read_weights
from raydist.checkpoint.ranges import TensorSpec, WantedRange
from raydist.errors import StorageError
from raydist.storage import ObjectStore, open_store
from raydist.storage.sequential import sequential_writer


@pytest.mark.parametrize("num_bytes", [0, 1, 70 << 20])
def test_writer_makes_the_object_of_all_its_pieces(store: ObjectStore, num_bytes: int) -> None:
    piece = random.Random(1).randbytes(1 << 20)
    with sequential_writer(store, "a/large.bin") as write:
        for at in range(0, num_bytes, len(piece)):
            write(memoryview(piece)[: num_bytes - at])
        assert store.size("a/large.bin") is None
    assert store.size("a/large.bin") == num_bytes
    assert store.get("a/large.bin") == (piece * (num_bytes // len(piece) + 1))[:num_bytes]
    assert [key for key, _ in store.list("")] == ["a/large.bin"]


def test_writer_that_fails_leaves_what_was_there(store: ObjectStore) -> None:
    store.put("kept.bin", b"earlier")

    def fail() -> None:
        with sequential_writer(store, "kept.bin") as write:
            write(b"half of it")
            raise FileNotFoundError("its user failed")

    with pytest.raises(FileNotFoundError, match="its user failed"):
        fail()
    assert store.get("kept.bin") == b"earlier"
    assert [key for key, _ in store.list("")] == ["kept.bin"]


def test_writer_replaces_the_object(store: ObjectStore) -> None:
    store.put("a.bin", b"a longer one from before")
    with sequential_writer(store, "a.bin") as write:
        write(b"new")
    assert store.get("a.bin") == b"new"


def test_writer_explains_a_filesystem_that_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with (
        pytest.raises(StorageError, match="Cannot write"),
        sequential_writer(open_store(str(tmp_path)), "file/a.bin") as write,
    ):
        write(b"x")


def test_weights_are_read_by_range_from_every_store(store: ObjectStore) -> None:
    given = {"w": torch.randn(300, 70), "b": torch.randn(7)}
    with sequential_writer(store, "model.safetensors") as write:
        write(save(given))
    specs = [
        TensorSpec(key=f"master/{name}", shape=tuple(tensor.shape), dtype="F32")
        for name, tensor in given.items()
    ]
    wanted = [
        WantedRange(spec=specs[0], offset=5, length=20_000),
        WantedRange(spec=specs[1], offset=0, length=7),
    ]
    match = match_tensors(read_weight_files(store, where="x"), specs)
    planned = plan_weight_reads(match.sources, wanted, read_bytes=30_000)
    found = {k: torch.frombuffer(d, dtype=torch.float32) for k, d in read_weights(store, planned)}
    assert torch.equal(found["master/w"], given["w"].flatten()[5:20_005])
    assert torch.equal(found["master/b"], given["b"])
