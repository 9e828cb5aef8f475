# SPDX-License-Identifier: Apache-2.0
"""The manifest: everything a checkpoint is, in one JSON object written last."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raydist.checkpoint.objects import DataObject, crc32c
from raydist.checkpoint.packing import Range, Runs, pack_blocks, unpack_blocks
from raydist.checkpoint.ranges import DTYPE_BYTES, TensorSpec, check_cover
from raydist.checkpoint.sealed import seal, unseal
from raydist.errors import CheckpointError

FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the run had come.

    Fields:
        step: Optimizer steps done, skipped ones among them.
        data_position: Samples consumed since the start; the whole of the data's state.
        epoch: data_position over the corpus's samples.
        tokens: Tokens seen.
        skipped_steps: Steps whose update was left out as non-finite.
    """

    step: int
    data_position: int
    epoch: int
    tokens: int
    skipped_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One checkpoint.

    Fields:
        tensors: Logical tensors by key.
        objects: Data objects; ranges name them by index.
        ranges: For each tensor key, (object index, StoredRange) that together cover it; Runs
            when it was decoded.
        corpus: Identity of the tokens it was trained on, as ``data.Corpus`` computes it.
        scalars: Optimizer scalars (Adam's step count) by name.
    """

    run: str
    attempt: int
    world_size: int
    strategy: str
    precision: str
    config_hash: str
    corpus: str
    created_unix_s: float
    versions: dict[str, str]
    progress: Progress
    scalars: dict[str, float]
    tensors: dict[str, TensorSpec]
    objects: tuple[DataObject, ...]
    ranges: Mapping[str, Sequence[Range]]
    format: int = FORMAT

    @property
    def total_bytes(self) -> int:
        """Bytes of all data objects."""
        return sum(o.bytes for o in self.objects)

    def check(self) -> None:
        """Prove that ranges cover every tensor once and objects, checksummed whole, hold them.

        Raises:
            CheckpointError: They do not.
        """
        if self.tensors.keys() != self.ranges.keys():
            odd = sorted(self.tensors.keys() ^ self.ranges.keys())
            raise CheckpointError(problem=f"Tensors and ranges differ in {', '.join(odd[:3])}.")
        for o in self.objects:
            if o.block_bytes < 1 or len(o.blocks) != -(-o.bytes // o.block_bytes):
                raise CheckpointError(
                    problem=f"{o.key}: {len(o.blocks)} checksums of blocks of {o.block_bytes} "
                    f"bytes do not cover {o.bytes} bytes."
                )
        sizes = [o.bytes for o in self.objects]
        for key, stored in self.ranges.items():
            spec, runs = self.tensors[key], Runs.of(stored).runs
            check_cover(key, spec.numel, ((at, length * n) for _, at, length, _, n in runs))
            for first, at, length, start, count in runs:
                held = sizes[first : first + count] if first >= 0 else []
                end = start + length * DTYPE_BYTES[spec.dtype]
                if start < 0 or count < 1 or len(held) != count or end > min(held):
                    raise CheckpointError(problem=f"{key}: range at {at} is outside its object.")

    def encode(self) -> bytes:
        """Return the manifest as JSON."""
        tree = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        tree["progress"] = dataclasses.asdict(self.progress)
        tree["tensors"] = {k: [list(s.shape), s.dtype] for k, s in self.tensors.items()}
        tree["objects"] = [
            {
                "key": o.key,
                "bytes": o.bytes,
                "crc32c": o.crc32c,
                "block_bytes": o.block_bytes,
                "blocks": pack_blocks(o.blocks),
            }
            for o in self.objects
        ]
        tree["ranges"] = {key: Runs.of(stored).runs for key, stored in self.ranges.items()}
        return seal(tree)


def decode(raw: bytes, *, where: str) -> Manifest:
    """Read a manifest and prove its coverage.

    Raises:
        CheckpointError: Not a manifest, of a newer format, or its ranges do not add up.
    """
    try:
        tree: dict[str, Any] = unseal(raw)
        if tree["format"] > FORMAT:
            raise CheckpointError(
                problem=f"{where} has format {tree['format']}; this raydist reads up to {FORMAT}.",
                way_out="Upgrade raydist.",
            )
        tree["progress"] = Progress(**tree["progress"])
        tree["tensors"] = {
            key: TensorSpec(key=key, shape=tuple(shape), dtype=dtype)
            for key, (shape, dtype) in tree["tensors"].items()
        }
        tree["objects"] = tuple(
            DataObject(**{**o, "blocks": unpack_blocks(o["blocks"])}) for o in tree["objects"]
        )
        tree["ranges"] = {key: Runs(runs) for key, runs in tree["ranges"].items()}
        manifest = Manifest(**tree)
        manifest.check()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(problem=f"{where} is not a manifest: {error!r}.") from error
    return manifest


def checksum(raw: bytes) -> int:
    """CRC32C of an encoded manifest, as the journal's commit entry records it."""
    return crc32c(raw)
