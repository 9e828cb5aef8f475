# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds and how two differ. Real: stores, saver. Faked: ranks are threads."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest
from checkpoint_scenario import SPECS, State, ToyRun, random_state

from raydist.checkpoint import compare
from raydist.checkpoint.compare import Distance, diff_manifests, measure_distances, summarize
from raydist.checkpoint.inspect import read_manifest
from raydist.checkpoint.layout import manifest_key, part_key
from raydist.checkpoint.manifest import Manifest
from raydist.checkpoint.ranges import TensorSpec
from raydist.errors import CheckpointCorruptError
from raydist.testing.memory_store import MemoryStore


def saved(store: MemoryStore, state: State, step: int, *, world_size: int = 2) -> Manifest:
    run = ToyRun(store, world_size=world_size)
    run.save(state, step)
    return read_manifest(store, manifest_key(step, run.attempt.number))


def test_summary_adds_up() -> None:
    store = MemoryStore()
    manifest = saved(store, random_state(1), 7, world_size=3)
    found = summarize(manifest)
    assert found.tensors_by_kind == {"master": 2, "exp_avg": 1, "buffer": 3, "rng": 3}
    assert found.bytes_by_kind == {"master": 144, "exp_avg": 140, "buffer": 17, "rng": 33}
    assert found.rank_bytes == tuple(store.size(part_key(7, 1, rank, 3)) for rank in range(3))
    assert found.total_bytes == sum(found.rank_bytes)
    assert (found.run, found.attempt, found.world_size, found.strategy) == ("toy", 1, 3, "ddp")
    assert found.progress["step"] == 7
    assert found.versions == {"raydist": "test"}


def test_diff_names_what_differs_and_nothing_else() -> None:
    a = saved(MemoryStore(), random_state(1), 7)
    assert diff_manifests(a, a) == {}
    changed = replace(SPECS[0], shape=(5, 7))
    b = replace(
        a,
        config_hash="beef",
        versions={"raydist": "test", "torch": "2"},
        progress=replace(a.progress, step=9),
        tensors={key: s for key, s in a.tensors.items() if key != SPECS[2].key}
        | {changed.key: changed},
    )
    assert diff_manifests(a, b) == {
        "config_hash": ("cafe", "beef"),
        "versions.torch": (None, "2"),
        "progress.step": (7, 9),
        SPECS[0].key: ("[7, 5] F32", "[5, 7] F32"),
        SPECS[2].key: ("[2] BF16", None),
    }


def values(spec: TensorSpec, *numbers: float) -> State:
    form = {"F32": "f", "F64": "d", "F16": "e", "I64": "q", "I32": "i", "U8": "B", "BOOL": "?"}
    if spec.dtype == "BF16":
        raw = b"".join(struct.pack("<f", n)[2:] for n in numbers)
    else:
        raw = struct.pack(f"<{len(numbers)}{form[spec.dtype]}", *numbers)
    return {spec: raw}


def distance(store: MemoryStore, left: State, right: State) -> Distance:
    """Between steps 1 and 2, saved by 2 and by 3 ranks."""
    a = saved(store, left, 1, world_size=2)
    b = saved(store, right, 2, world_size=3)
    (found,) = [d for d in measure_distances(store, a, b) if not d.key.startswith("rng/")]
    return found


@pytest.mark.parametrize("dtype", ["F32", "F64", "F16", "BF16", "I64", "I32", "U8"])
def test_distance_is_the_largest_over_ranks_and_windows(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "_WINDOW_BYTES", 16)
    spec = TensorSpec(key="master/w", shape=(3, 3), dtype=dtype)
    found = distance(
        MemoryStore(),
        values(spec, 1, 2, 3, 4, 5, 6, 7, 8, 9),
        values(spec, 1, 2, 5, 4, 5, 6, 7, 8, 4),
    )
    assert found == Distance(key="master/w", max_abs=5.0, num_different=2, numel=9)


def test_distance_of_equal_values_is_none_also_where_they_are_not_finite() -> None:
    spec = TensorSpec(key="master/w", shape=(4,), dtype="F32")
    state = values(spec, math.nan, math.inf, -math.inf, 0.0)
    found = distance(MemoryStore(), state, state)
    assert (found.max_abs, found.num_different) == (0.0, 0)


@pytest.mark.parametrize("other", [math.nan, math.inf])
def test_distance_to_what_is_not_finite_is_infinite(other: float) -> None:
    spec = TensorSpec(key="master/w", shape=(2,), dtype="F32")
    found = distance(MemoryStore(), values(spec, 1.0, 2.0), values(spec, 1.0, other))
    assert (found.max_abs, found.num_different) == (math.inf, 1)


def test_distance_reads_verified_bytes_only() -> None:
    store = MemoryStore()
    a, b = (saved(store, random_state(1), step) for step in (1, 2))
    key = part_key(2, 2, 1, 2)
    raw = bytearray(store.get(key))
    raw[-1] ^= 1
    store.put(key, raw)
    with pytest.raises(CheckpointCorruptError, match=key):
        measure_distances(store, a, b)
