# SPDX-License-Identifier: Apache-2.0
"""Format 1 from outside: a reader of thirty lines that knows only JSON and struct.

Faked: ranks are threads. Real: files of a LocalStore.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path

import pytest
import safetensors
from checkpoint_scenario import SPECS, ToyRun, random_state

from raydist.checkpoint import layout
from raydist.checkpoint.journal import Entry, Journal
from raydist.checkpoint.sealed import seal
from raydist.storage.local import LocalStore

WIDTHS = {"F32": 4, "BF16": 2, "I64": 8, "BOOL": 1, "U8": 1}


def read_newest(root: Path) -> tuple[int, dict[str, tuple[list[int], str, bytes]]]:
    """Step and whole tensors of a run's newest commit. Imports nothing of raydist."""
    entries = [json.loads(p.read_text()) for p in sorted((root / "journal").glob("0*.json"))]
    assert [entry["number"] for entry in entries] == list(range(1, len(entries) + 1))
    commit = [entry for entry in entries if entry["kind"] == "committed"][-1]
    manifest = json.loads((root / commit["facts"]["manifest"]).read_text())
    assert manifest["format"] == 1
    tensors = {}
    for key, (shape, dtype) in manifest["tensors"].items():
        numel = 1
        for size in shape:
            numel *= size
        whole = bytearray(numel * WIDTHS[dtype])
        runs = manifest["ranges"][key]
        ranges = [(i + n, o + n * m, m, at) for i, o, m, at, count in runs for n in range(count)]
        for index, offset, length, start in ranges:
            raw = (root / manifest["objects"][index]["key"]).read_bytes()
            (header_bytes,) = struct.unpack("<Q", raw[:8])
            entry = json.loads(raw[8 : 8 + header_bytes])[f"{key}@{offset}"]
            begin, end = (8 + header_bytes + at for at in entry["data_offsets"])
            assert (entry["dtype"], entry["shape"], begin) == (dtype, [length], start)
            at = offset * WIDTHS[dtype]
            whole[at : at + end - begin] = raw[begin:end]
        tensors[key] = (shape, dtype, bytes(whole))
    return manifest["progress"]["step"], tensors


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_committed_checkpoint_is_rebuilt_by_a_reader_that_knows_only_the_format(
    tmp_path: Path, world_size: int
) -> None:
    run = ToyRun(LocalStore(str(tmp_path)), world_size=world_size)
    run.save(random_state(1), 3)
    state = random_state(2)
    run.save(state, 6)
    step, tensors = read_newest(tmp_path)
    assert step == 6
    for spec in SPECS:
        assert tensors.pop(spec.key) == (list(spec.shape), spec.dtype, state[spec])
    assert tensors == {
        f"rng/cpu/rank-{rank:05d}-of-{world_size:05d}": ([11], "U8", bytes([rank] * 11))
        for rank in range(world_size)
    }


def test_committed_run_has_the_files_that_the_format_names(tmp_path: Path) -> None:
    run = ToyRun(LocalStore(str(tmp_path)))
    run.save(random_state(1), 1200)
    folder = "checkpoints/step-000000001200/attempt-0001"
    found = {
        os.path.relpath(os.path.join(top, name), tmp_path)
        for top, _, names in os.walk(tmp_path)
        for name in names
    }
    assert found == {
        "journal/00000001.json",
        "journal/00000002.json",
        "journal/hint",
        "journal/alive-0001.json",
        f"{folder}/rank-00000-of-00002.safetensors",
        f"{folder}/rank-00001-of-00002.safetensors",
        f"{folder}/manifest.json",
    }
    for name in (f"rank-{rank:05d}-of-00002.safetensors" for rank in range(2)):
        with safetensors.safe_open(tmp_path / folder / name, framework="numpy") as file:
            assert "master/embed.weight@" in " ".join(file.keys())


def test_same_state_saved_twice_is_the_same_bytes(tmp_path: Path) -> None:
    sums = []
    for name in ("a", "b"):
        ToyRun(LocalStore(str(tmp_path / name))).save(random_state(1), 1)
        parts = sorted((tmp_path / name).rglob("*.safetensors"))
        sums.append([hashlib.sha256(part.read_bytes()).hexdigest() for part in parts])
    assert len(sums[0]) == 2
    assert sums[0] == sums[1]


def test_keys_of_a_run_sort_as_they_count() -> None:
    assert layout.journal_key(12) == "journal/00000012.json"
    assert layout.lease_key(3) == "journal/alive-0003.json"
    assert layout.part_key(1200, 3, 3, 16) == (
        "checkpoints/step-000000001200/attempt-0003/rank-00003-of-00016.safetensors"
    )
    assert layout.manifest_key(1200, 3).endswith("step-000000001200/attempt-0003/manifest.json")
    keys = [layout.part_key(s, a, r, 8) for s in (9, 10, 100) for a in (2, 10) for r in (1, 7)]
    assert keys == sorted(keys)


def test_entry_of_format_1_written_by_hand_is_read() -> None:
    raw = {
        "number": 1,
        "kind": "closed",
        "attempt": 2,
        "driver": "d",
        "holder": "h:1:2",
        "unix_s": 5,
        "last_commit": None,
        "facts": {"why": "finished"},
    }

    class One(LocalStore):
        def get(self, key: str, **_: object) -> bytes:
            assert key == "journal/00000001.json"
            return seal(raw)

    assert Journal(One("/nowhere")).read(1) == Entry(**raw)
