# SPDX-License-Identifier: Apache-2.0
"""Ranges of ranks out of safetensors files: which bytes, which values, how much memory.

Faked: the disk, as memory that counts. The memory test runs a process of its own on real files.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from checkpoint_scenario import Fault, WatchedStore
from huggingface_directory import SHAPES, files, sharded, single, specs, tensors

from raydist.checkpoint.huggingface_match import match_tensors
from raydist.checkpoint.huggingface_reads import plan_weight_reads, read_weights
from raydist.checkpoint.ranges import TensorSpec, WantedRange, partition
from raydist.errors import CheckpointCorruptError, StorageError

EMBED = "model.embed_tokens.weight"


def _wanted(items: list[TensorSpec], rank: int, world_size: int) -> list[WantedRange]:
    wanted = []
    for spec in items:
        offset, length = partition(spec.numel, world_size=world_size, rank=rank)
        wanted.append(WantedRange(spec=spec, offset=offset, length=length))
    return wanted


def _read(store, items, rank=0, world_size=1, **limits) -> dict[str, torch.Tensor]:
    match = match_tensors(files(store), items)
    planned = plan_weight_reads(match.sources, _wanted(items, rank, world_size), **limits)
    return {
        key: torch.frombuffer(bytearray(data), dtype=torch.float32)
        for key, data in read_weights(store, planned, window_bytes=100)
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [single, sharded])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_reads_of_all_ranks_are_the_tensors_in_fp32(make, dtype, world_size) -> None:
    given = tensors(dtype=dtype)
    store = make(given)
    found = [_read(store, specs(), rank, world_size, read_bytes=40) for rank in range(world_size)]
    for name, tensor in given.items():
        parts = [rank[f"master/{name}"] for rank in found if f"master/{name}" in rank]
        assert torch.equal(torch.cat(parts), tensor.float().flatten())


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_reads_into_a_narrower_model_round_as_torch_does(dtype: str) -> None:
    given = tensors()
    mine = [TensorSpec(key=s.key, shape=s.shape, dtype=dtype) for s in specs()]
    store = single(given)
    planned = plan_weight_reads(match_tensors(files(store), mine).sources, _wanted(mine, 0, 1))
    narrow = {"BF16": torch.bfloat16, "F16": torch.float16}[dtype]
    for key, data in read_weights(store, planned):
        found = torch.frombuffer(bytearray(data), dtype=narrow)
        assert torch.equal(found, given[key.removeprefix("master/")].flatten().to(narrow))


def test_reads_of_a_rank_are_its_bytes_and_no_others() -> None:
    store = WatchedStore(single(tensors(dtype=torch.bfloat16)))
    there = files(store)
    wanted = _wanted(specs(), 1, 3)
    planned = plan_weight_reads(match_tensors(there, specs()).sources, wanted)
    store.requests.clear()
    list(read_weights(store, planned))
    read = sum(r.num_bytes for r in store.requests)
    assert read == 2 * sum(w.length for w in wanted)
    assert len(store.requests) == len([w for w in wanted if w.length])


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_reads_of_added_rows_leave_them_out(world_size: int) -> None:
    given = tensors()
    larger = {**SHAPES, EMBED: (15, 6), "lm_head.weight": (15, 6)}
    parts = [
        _read(single(given), specs(larger), rank, world_size).get(f"master/{EMBED}")
        for rank in range(world_size)
    ]
    found = torch.cat([part for part in parts if part is not None])
    assert torch.equal(found, given[EMBED].flatten())


def test_reads_of_cut_rows_stop_at_the_last_wanted() -> None:
    given = tensors()
    fewer = {**SHAPES, EMBED: (9, 6), "lm_head.weight": (9, 6)}
    found = _read(single(given), specs(fewer))
    assert torch.equal(found[f"master/{EMBED}"], given[EMBED][:9].flatten())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_reads_of_a_value_that_is_not_finite_name_it(value: float) -> None:
    given = tensors()
    given[EMBED][3, 2] = value
    with pytest.raises(CheckpointCorruptError, match=f"element 20 of {EMBED} is not finite"):
        _read(single(given), specs(), read_bytes=40)


def test_reads_of_a_file_cut_after_its_header_was_read_are_refused() -> None:
    store = single(tensors())
    match = match_tensors(files(store), specs())
    planned = plan_weight_reads(match.sources, _wanted(specs(), 0, 1))
    store.put("model.safetensors", store.get("model.safetensors")[:-20])
    with pytest.raises(CheckpointCorruptError, match=r"bytes at .* are due"):
        list(read_weights(store, planned))
    store.delete("model.safetensors")
    with pytest.raises(CheckpointCorruptError, match="the file is missing"):
        list(read_weights(store, planned))


def test_reads_pass_a_failing_store_on() -> None:
    inner = single(tensors())
    planned = plan_weight_reads(
        match_tensors(files(inner), specs()).sources, _wanted(specs(), 0, 1)
    )
    with pytest.raises(StorageError, match="injected"):
        list(read_weights(WatchedStore(inner, Fault(operation="get")), planned))


def test_reads_ahead_stay_within_the_window() -> None:
    shapes = {f"t{n}": (25,) for n in range(20)}  # 100 bytes each
    store = WatchedStore(single(tensors(shapes)))
    mine = specs(shapes)
    match = match_tensors(files(store), mine)
    planned = plan_weight_reads(match.sources, _wanted(mine, 0, 1))
    store.requests.clear()
    reads = read_weights(store, planned, window_bytes=300)
    for taken in range(1, 21):
        next(reads)
        # The caller holds one range of the window; no more than two others are begun.
        assert len(store.requests) <= taken + 2
    assert next(reads, None) is None


_MEMORY = textwrap.dedent("""
    import json, sys
    from pathlib import Path
    from raydist.checkpoint.huggingface_files import read_weight_files
    from raydist.checkpoint.huggingface_match import match_tensors
    from raydist.checkpoint.huggingface_reads import plan_weight_reads, read_weights
    from raydist.checkpoint.ranges import TensorSpec, WantedRange, partition
    from raydist.storage import open_store

    def peak():
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10

    store = open_store(sys.argv[1])
    files = read_weight_files(store, where="x")
    specs = [TensorSpec(key="master/" + t.name, shape=t.shape, dtype="F32")
             for t in files.tensors.values()]
    wanted = []
    for spec in specs:
        offset, length = partition(spec.numel, world_size=2, rank=1)
        wanted.append(WantedRange(spec=spec, offset=offset, length=length))
    planned = plan_weight_reads(match_tensors(files, specs).sources, wanted, read_bytes=1 << 20)
    Path("/proc/self/clear_refs").write_text("5")
    before, total = peak(), 0
    for _, data in read_weights(store, planned, window_bytes=16 << 20):
        total += len(data)
    print(json.dumps({"grown": peak() - before, "total": total}))
""")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak")
def test_reads_peak_memory_is_the_window_whatever_the_share(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    layer = {f"layer.{n}.weight": torch.zeros(1 << 20, 4, dtype=torch.bfloat16) for n in range(24)}
    save_file(layer, tmp_path / "model.safetensors")  # 192 MiB; a rank's half is as much in fp32
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["total"] == 192 << 20
    # The window of 16 MiB, the range that the caller holds, and what four readers work on.
    assert found["grown"] < 64 << 20
