# SPDX-License-Identifier: Apache-2.0
"""Listing and verifying checkpoints. Real: MemoryStore, LocalStore. Faked: ranks are threads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoint_scenario import ToyRun, WatchedStore, random_state

from raydist.checkpoint.inspect import (
    has_uncommitted_objects,
    list_checkpoints,
    verify_checkpoint,
)
from raydist.checkpoint.layout import manifest_key, part_key
from raydist.checkpoint.sealed import seal, unseal
from raydist.errors import CheckpointCorruptError, CheckpointError
from raydist.storage.local import LocalStore
from raydist.testing.memory_store import MemoryStore


def test_list_of_a_run_is_its_commits_newest_first_over_attempts() -> None:
    store = MemoryStore()
    assert list_checkpoints(store) == []
    first = ToyRun(store)
    first.save(random_state(1), 1)
    first.save(random_state(2), 2, errors={1: CheckpointError(problem="not finite")})
    first.save(random_state(3), 3)
    second = ToyRun(store, world_size=3)
    second.save(random_state(3), 3)
    second.attempt.close("finished")
    found = list_checkpoints(store)
    assert [(i.step, i.attempt, i.world_size) for i in found] == [(3, 2, 3), (3, 1, 2), (1, 1, 2)]
    assert [i.manifest for i in found] == [manifest_key(s, a) for s, a in [(3, 2), (3, 1), (1, 1)]]
    sizes = dict(store.list("checkpoints/"))
    assert found[2].bytes == sum(sizes[part_key(1, 1, rank, 2)] for rank in range(2))
    assert {(i.strategy, i.problem) for i in found} == {("ddp", "")}


def test_list_reads_no_data_object_and_lists_nothing() -> None:
    store = WatchedStore(MemoryStore())
    ToyRun(store).save(random_state(1), 1)
    store.requests.clear()
    list_checkpoints(store)
    assert {request.operation for request in store.requests} == {"get"}
    assert not [r for r in store.requests if r.key.endswith(".safetensors")]


def test_list_with_a_damaged_manifest_says_so_beside_the_others() -> None:
    store = MemoryStore()
    run = ToyRun(store)
    for step in (1, 2):
        run.save(random_state(step), step)
    store.delete(manifest_key(2, 1))
    bad, good = list_checkpoints(store)
    assert (bad.step, good.step, good.problem) == (2, 1, "")
    assert "is missing" in bad.problem


def test_verify_of_a_copied_folder_needs_its_manifest_only(tmp_path: Path) -> None:
    ToyRun(LocalStore(str(tmp_path / "run"))).save(random_state(1), 1)
    shutil.rmtree(tmp_path / "run/journal")
    manifest, problems = verify_checkpoint(LocalStore(str(tmp_path / "run")), manifest_key(1, 1))
    assert manifest.progress.step == 1
    assert problems == []


def test_verify_names_every_damaged_object() -> None:
    store = MemoryStore()
    ToyRun(store, world_size=4).save(random_state(1), 1)
    keys = [part_key(1, 1, rank, 4) for rank in range(4)]
    store.delete(keys[0])
    store.put(keys[1], store.get(keys[1])[:-1])
    raw = bytearray(store.get(keys[3]))
    raw[20] ^= 1
    store.put(keys[3], raw)
    _, problems = verify_checkpoint(store, manifest_key(1, 1))
    assert [problem.split(":")[0] for problem in problems] == [keys[0], keys[1], keys[3]]


def test_verify_without_a_readable_manifest_is_an_error() -> None:
    store = MemoryStore()
    ToyRun(store).save(random_state(1), 1)
    key = manifest_key(1, 1)
    tree = unseal(store.get(key))
    tree["objects"][0]["blocks"] = ""
    store.put(key, seal(tree))
    with pytest.raises(CheckpointError, match="checksums"):
        verify_checkpoint(store, key)
    store.delete(key)
    with pytest.raises(CheckpointCorruptError, match=key):
        verify_checkpoint(store, key)


def test_uncommitted_objects_are_seen() -> None:
    store = MemoryStore()
    assert not has_uncommitted_objects(store)
    store.put(part_key(1, 1, 0, 2), b"x")
    assert has_uncommitted_objects(store)
