# SPDX-License-Identifier: Apache-2.0
"""A prepared corpus: one stream of token ids in parts, and the manifest that proves it.

Parts are raw little-endian token ids, so that a local part is a memory map and a remote one
is read by range. The manifest is written last; without it there is no corpus.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydist.data.order import sample_indices
from raydist.errors import DataError, ObjectMissingError
from raydist.storage import ObjectStore
from raydist.storage.local import LocalStore

MANIFEST_KEY = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusPart:
    """One object of token ids."""

    key: str
    num_tokens: int
    num_documents: int
    crc32c: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusManifest:
    """What a corpus holds and where it came from.

    Fields:
        dtype: numpy name of one token id, little-endian (`uint16`).
        vocab_size: Ids are in [0, vocab_size).
        parts: In stream order.
    """

    format: int
    source: str
    tokenizer: str
    dtype: str
    vocab_size: int
    num_tokens: int
    num_documents: int
    parts: tuple[CorpusPart, ...]

    def to_json(self) -> bytes:
        """Return the manifest as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1).encode()


def read_manifest(store: ObjectStore, *, where: str) -> CorpusManifest | None:
    """Return the corpus manifest under ``store``, or None where no corpus was finished.

    Raises:
        DataError: There is one, of a newer format or not readable.
    """
    try:
        raw: dict[str, Any] = json.loads(store.get(MANIFEST_KEY))
        if raw["format"] > FORMAT:
            raise DataError(
                problem=f"The corpus at {where} has format {raw['format']}; this raydist reads "
                f"up to {FORMAT}.",
                way_out="Upgrade raydist, or prepare the corpus again.",
            )
        parts = tuple(CorpusPart(**part) for part in raw.pop("parts"))
        return CorpusManifest(parts=parts, **raw)
    except ObjectMissingError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            problem=f"The corpus manifest at {where} cannot be read: {error!r}.",
            way_out="Delete that corpus and prepare it again.",
        ) from error


class Corpus:
    """Sequences of a fixed length, addressed by global position."""

    def __init__(
        self, store: ObjectStore, manifest: CorpusManifest, *, sequence_length: int, seed: int,
        shuffle: bool = True,
    ) -> None:
        self._store = store
        self._manifest = manifest
        self._sequence_length = sequence_length
        self._seed = seed
        self._shuffle = shuffle
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        counts = [part.num_tokens for part in manifest.parts]
        self._ends = np.cumsum(np.asarray(counts, np.int64))
        self._maps: dict[int, NDArray[Any]] = {}

    @property
    def num_samples(self) -> int:
        """Whole sequences in the corpus."""
        return self._manifest.num_tokens // self._sequence_length

    def batch(self, positions: range) -> NDArray[np.int64]:
        """Return the token ids at global ``positions``, int64 [len(positions), sequence_length].

        Raises:
            DataError: A part is missing or shorter than the manifest says.
        """
        indices = sample_indices(
            np.arange(positions.start, positions.stop, dtype=np.int64),
            num_samples=self.num_samples, seed=self._seed, shuffle=self._shuffle,
        )
        tokens_BL = np.empty((len(positions), self._sequence_length), np.int64)
        for row, index in zip(tokens_BL, indices, strict=True):
            self._read(int(index) * self._sequence_length, row)
        return tokens_BL

    def _read(self, start: int, out: NDArray[np.int64]) -> None:
        part = int(np.searchsorted(self._ends, start, side="right"))
        done = 0
        while done < len(out):
            info = self._manifest.parts[part]
            first = start + done - int(self._ends[part] - info.num_tokens)
            count = min(len(out) - done, info.num_tokens - first)
            out[done : done + count] = self._tokens(part, first, count)
            done += count
            part += 1

    def _tokens(self, part: int, first: int, count: int) -> NDArray[Any]:
        info = self._manifest.parts[part]
        if isinstance(self._store, LocalStore):
            if part not in self._maps:
                self._maps[part] = self._map(info)
            return self._maps[part][first : first + count]
        width = self._dtype.itemsize
        raw = self._store.get(info.key, start=first * width, length=count * width)
        if len(raw) != count * width:
            raise _altered(info, f"{len(raw)} bytes at token {first} where {count * width} are due")
        return np.frombuffer(raw, self._dtype)

    def _map(self, info: CorpusPart) -> NDArray[Any]:
        size = self._store.size(info.key)
        if size != info.num_tokens * self._dtype.itemsize:
            raise _altered(info, f"{size} bytes for {info.num_tokens} tokens")
        path = self._store.path(info.key)
        return np.memmap(path, self._dtype, mode="r")


def _altered(info: CorpusPart, reason: str) -> DataError:
    return DataError(
        problem=f"Corpus part {info.key} is not as the manifest says: {reason}.",
        way_out="Delete that corpus and prepare it again.",
    )
