# SPDX-License-Identifier: Apache-2.0
"""A prepared corpus: one stream of token ids in parts, and the manifest that proves it.

Parts are raw little-endian token ids, so that a local part is a memory map and a remote one
is read by range. The manifest is written last; without it there is no corpus.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from awscrt import checksums
from numpy.typing import NDArray

from raydist.data.order import sample_indices
from raydist.errors import DataError, ObjectMissingError
from raydist.storage import ObjectStore
from raydist.storage.local import LocalStore

MANIFEST_KEY = "manifest.json"
FORMAT = 1
_PREPARE_AGAIN = (
    "Delete the prepared corpus (its folder below <storage>/corpora, not the source) "
    "and start again."
)
_MAX_MAPS = 256  # Each map holds a file descriptor; a process has 1024 by default.


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
        return _checked_manifest(raw)
    except ObjectMissingError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            problem=f"The corpus manifest at {where} cannot be read: {error!r}.",
            way_out=_PREPARE_AGAIN,
        ) from error


def _checked_manifest(raw: dict[str, Any]) -> CorpusManifest:
    parts = tuple(CorpusPart(**part) for part in raw.pop("parts"))
    manifest = CorpusManifest(parts=parts, **raw)
    np.dtype(manifest.dtype)
    in_parts = sum(part.num_tokens for part in parts)
    if in_parts != manifest.num_tokens:
        raise ValueError(f"{manifest.num_tokens} tokens in all, {in_parts} in its parts")
    return manifest


class Corpus:
    """Sequences of a fixed length, addressed by global position.

    A part is proven when it is first used: a local one by its checksum, a remote one, of which
    only ranges are read, by its size. Every id is held against the vocabulary.
    """

    def __init__(
        self,
        store: ObjectStore,
        manifest: CorpusManifest,
        *,
        sequence_length: int,
        seed: int,
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
        self._proven: set[int] = set()
        self._maps: dict[int, NDArray[Any]] = {}

    @property
    def identity(self) -> str:
        """Short hash of the corpus's content and order; what a resumed run must share."""
        parts = [(part.num_tokens, part.crc32c) for part in self._manifest.parts]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    @property
    def num_samples(self) -> int:
        """Whole sequences in the corpus."""
        return self._manifest.num_tokens // self._sequence_length

    def batch(self, positions: range) -> NDArray[np.int64]:
        """Return the token ids at global ``positions``, int64 [len(positions), sequence_length].

        Raises:
            DataError: A part is missing, or is not what the manifest says.
        """
        indices = sample_indices(
            np.arange(positions.start, positions.stop, dtype=np.int64),
            num_samples=self.num_samples,
            seed=self._seed,
            shuffle=self._shuffle,
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
            tokens = self._tokens(part, first, count)
            if tokens.max(initial=0) >= self._manifest.vocab_size:
                raise _altered(
                    info,
                    f"it has the id {tokens.max()}, the vocabulary {self._manifest.vocab_size} ids",
                )
            out[done : done + count] = tokens
            done += count
            part += 1

    def _tokens(self, part: int, first: int, count: int) -> NDArray[Any]:
        info = self._manifest.parts[part]
        if part not in self._proven:
            self._check_size(info)
        if isinstance(self._store, LocalStore):
            return self._map(self._store, part)[first : first + count]
        self._proven.add(part)
        width = self._dtype.itemsize
        try:
            raw = self._store.get(info.key, start=first * width, length=count * width)
        except ObjectMissingError as error:
            raise _altered(info, "it is missing") from error
        if len(raw) != count * width:
            raise _altered(info, f"{len(raw)} bytes at token {first} where {count * width} are due")
        return np.frombuffer(raw, self._dtype)

    def _check_size(self, info: CorpusPart) -> None:
        size, due = self._store.size(info.key), info.num_tokens * self._dtype.itemsize
        if size is None:
            raise _altered(info, "it is missing")
        if size != due:
            raise _altered(info, f"{size} bytes where {due} are due for {info.num_tokens} tokens")

    def _map(self, store: LocalStore, part: int) -> NDArray[Any]:
        mapped = self._maps.get(part)
        if mapped is None:
            info = self._manifest.parts[part]
            try:
                mapped = np.memmap(store.path(info.key), self._dtype, mode="r")
            except (OSError, ValueError) as error:
                raise _altered(info, f"it cannot be mapped ({error})") from error
            content: Any = mapped.data
            if part not in self._proven and checksums.crc32c(content) != info.crc32c:
                raise _altered(info, f"its checksum is not {info.crc32c:#010x}")
            self._proven.add(part)
            if len(self._maps) >= _MAX_MAPS:
                del self._maps[next(iter(self._maps))]
            self._maps[part] = mapped
        return mapped


def _altered(info: CorpusPart, reason: str) -> DataError:
    return DataError(
        problem=f"Corpus part {info.key} is not as the manifest says: {reason}.",
        way_out=_PREPARE_AGAIN,
    )
