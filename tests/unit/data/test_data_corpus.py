# SPDX-License-Identifier: Apache-2.0
"""Sequences out of a prepared corpus. Real: files and the memory store; parts are made here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from awscrt import checksums
from numpy.typing import NDArray

from raydist.data.corpus import (
    FORMAT,
    MANIFEST_KEY,
    Corpus,
    CorpusManifest,
    CorpusPart,
    read_manifest,
)
from raydist.data.order import sample_indices
from raydist.errors import DataError
from raydist.storage import ObjectStore
from raydist.storage.local import LocalStore
from raydist.testing.memory_store import MemoryStore

_SIZES = (1, 5, 40, 2, 3, 61, 7)
"""Tokens of the parts: shorter and longer than a sequence, and no multiple of one."""


def _stream(num_tokens: int) -> NDArray[np.uint16]:
    return np.random.default_rng(0).integers(0, 257, num_tokens).astype("<u2")


def _fill(store: ObjectStore, sizes: tuple[int, ...] = _SIZES) -> CorpusManifest:
    """Write a stream cut into parts of ``sizes`` tokens, and its manifest."""
    stream = _stream(sum(sizes))
    parts, at = [], 0
    for index, size in enumerate(sizes):
        data = stream[at : at + size].tobytes()
        key = f"tokens-{index:05d}.bin"
        store.put(key, data)
        crc = checksums.crc32c(data)
        parts.append(CorpusPart(key=key, num_tokens=size, num_documents=1, crc32c=crc))
        at += size
    manifest = CorpusManifest(
        format=FORMAT, source="made", tokenizer="bytes", dtype="uint16", vocab_size=257,
        num_tokens=sum(sizes), num_documents=len(sizes), parts=tuple(parts),
    )  # fmt: skip
    store.put(MANIFEST_KEY, manifest.to_json())
    return manifest


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return LocalStore(str(tmp_path)) if request.param == "local" else MemoryStore()


def _corpus(
    store: ObjectStore, manifest: CorpusManifest, *, length: int = 8, shuffle: bool = True
) -> Corpus:
    return Corpus(store, manifest, sequence_length=length, seed=3, shuffle=shuffle)


@pytest.mark.parametrize("length", [2, 8, 13, 50, 119])
def test_corpus_unshuffled_gives_the_stream_across_part_borders(
    store: ObjectStore, length: int
) -> None:
    corpus = _corpus(store, _fill(store), length=length, shuffle=False)
    count = sum(_SIZES) // length
    assert corpus.num_samples == count
    tokens = corpus.batch(range(count))
    assert tokens.dtype == np.int64
    assert tokens.shape == (count, length)
    assert np.array_equal(tokens.ravel(), _stream(sum(_SIZES))[: count * length])


def test_corpus_shuffled_gives_the_sample_that_the_order_names(store: ObjectStore) -> None:
    corpus = _corpus(store, _fill(store))
    samples = _stream(sum(_SIZES))[: 14 * 8].reshape(14, 8)
    order = sample_indices(np.arange(10, 20), num_samples=14, seed=3)
    assert np.array_equal(corpus.batch(range(10, 20)), samples[order])


def test_corpus_stores_of_either_kind_give_the_same_tokens(tmp_path: Path) -> None:
    local, memory = LocalStore(str(tmp_path)), MemoryStore()
    from_local, from_memory = (_corpus(s, _fill(s)).batch(range(100)) for s in (local, memory))
    assert np.array_equal(from_local, from_memory)


def test_corpus_two_epochs_use_every_sample_once_each(store: ObjectStore) -> None:
    corpus = _corpus(store, _fill(store))
    samples = [tuple(s) for s in _stream(sum(_SIZES))[: 14 * 8].reshape(14, 8).tolist()]
    assert len(set(samples)) == 14
    drawn: list[tuple[int, ...]] = []
    for start in range(0, 28, 4):  # 4 does not divide 14: a batch spans both epochs
        drawn += [tuple(row) for row in corpus.batch(range(start, start + 4)).tolist()]
    assert sorted(drawn[:14]) == sorted(drawn[14:]) == sorted(samples)
    assert drawn[:14] != drawn[14:]


def test_corpus_of_many_parts_holds_few_descriptors(tmp_path: Path) -> None:
    store = MemoryStore()
    manifest = _fill(store, (8,) * 600)
    for key, _ in store.list(""):
        (tmp_path / key).write_bytes(store.get(key))  # without 600 times fsync
    corpus = _corpus(LocalStore(str(tmp_path)), manifest)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert np.array_equal(corpus.batch(range(600)), _corpus(store, manifest).batch(range(600)))
    assert len(os.listdir("/proc/self/fd")) - before < 300


def _shorten(store: ObjectStore, key: str) -> None:
    store.put(key, store.get(key)[:-2])


def _lengthen(store: ObjectStore, key: str) -> None:
    store.put(key, store.get(key) + b"\0\0")


def _exceed_the_vocabulary(store: ObjectStore, key: str) -> None:
    store.put(key, b"\xff\xff" * (len(store.get(key)) // 2))


def _remove(store: ObjectStore, key: str) -> None:
    store.delete(key)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_remove, "it is missing"),
        (_shorten, "78 bytes where 80 are due for 40 tokens"),
        (_lengthen, "82 bytes where 80 are due for 40 tokens"),
        (_exceed_the_vocabulary, ""),
    ],
)
def test_corpus_part_damaged_is_refused_by_name(
    store: ObjectStore, damage: Callable[[ObjectStore, str], None], reason: str
) -> None:
    manifest = _fill(store)
    damage(store, "tokens-00002.bin")
    with pytest.raises(DataError, match=rf"tokens-00002\.bin .*{reason}"):
        _corpus(store, manifest).batch(range(14))


def test_corpus_local_part_altered_within_the_vocabulary_is_refused_by_name(
    tmp_path: Path,
) -> None:
    store = LocalStore(str(tmp_path))
    manifest = _fill(store)
    path = tmp_path / "tokens-00005.bin"
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"tokens-00005\.bin .* its checksum is not 0x"):
        _corpus(store, manifest).batch(range(14))


def test_corpus_remote_part_lost_after_its_first_use_is_refused_by_name() -> None:
    store = MemoryStore()
    corpus = _corpus(store, _fill(store), shuffle=False)
    corpus.batch(range(14))
    store.delete("tokens-00005.bin")
    with pytest.raises(DataError, match=r"tokens-00005\.bin .*it is missing"):
        corpus.batch(range(14))


def test_manifest_round_trip_is_equal(store: ObjectStore) -> None:
    manifest = _fill(store)
    assert read_manifest(store, where="here") == manifest


def test_manifest_missing_is_none(store: ObjectStore) -> None:
    assert read_manifest(store, where="here") is None


def test_manifest_of_a_newer_format_is_refused_with_both_numbers(store: ObjectStore) -> None:
    manifest = replace(_fill(store), format=FORMAT + 1)
    store.put(MANIFEST_KEY, manifest.to_json())
    with pytest.raises(DataError, match=f"at here has format {FORMAT + 1}; .* up to {FORMAT}"):
        read_manifest(store, where="here")


def _manifest_with(**changes: object) -> bytes:
    manifest = json.loads(_fill(MemoryStore()).to_json())
    return json.dumps(manifest | changes).encode()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'"text"',
        b"\xff\xfe",
        b'{"format": "one"}',
        b'{"format": 1, "parts": [{}]}',
        _manifest_with(dtype="uint17"),
        _manifest_with(num_tokens=10**9),
        _manifest_with(colour="blue"),
    ],
)
def test_manifest_unreadable_is_refused_naming_the_place(raw: bytes) -> None:
    store = MemoryStore()
    store.put(MANIFEST_KEY, raw)
    with pytest.raises(DataError, match="manifest at s3://b/corpora/x cannot be read"):
        read_manifest(store, where="s3://b/corpora/x")
