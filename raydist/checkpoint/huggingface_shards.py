# SPDX-License-Identifier: Apache-2.0
"""How exported weights are cut into safetensors files, and the index over them. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raydist.checkpoint.ranges import DTYPE_BYTES
from raydist.errors import CheckpointError

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file: its header, then its tensors' bytes in the order of ``tensors``."""

    key: str
    header: bytes
    tensors: dict[str, Shape]
    data_bytes: int

    @property
    def bytes(self) -> int:
        """Of the whole file."""
        return len(self.header) + self.data_bytes


def plan_shards(shapes: Mapping[str, Shape], *, dtype: str, shard_bytes: int) -> list[Shard]:
    """Cut tensors, in their order, into files of at most ``shard_bytes`` of data.

    A tensor that is larger has a file of its own.

    Raises:
        CheckpointError: There is no tensor, or one without elements.
    """
    empty = [name for name, shape in shapes.items() if not math.prod(shape)]
    if empty or not shapes:
        raise CheckpointError(problem=f"Nothing to export in {', '.join(empty) or 'the model'}.")
    groups: list[dict[str, Shape]] = []
    held = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * DTYPE_BYTES[dtype]
        if not groups or held + size > shard_bytes:
            groups.append({})
            held = 0
        groups[-1][name] = shape
        held += size
    return [
        _shard(_file_name(number, len(groups)), group, dtype)
        for number, group in enumerate(groups, start=1)
    ]


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _shard(key: str, tensors: dict[str, Shape], dtype: str) -> Shard:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers 4 requires it
    at = 0
    for name, shape in tensors.items():
        end = at + math.prod(shape) * DTYPE_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return Shard(
        key=key,
        header=len(header).to_bytes(8, "little") + header,
        tensors=tensors,
        data_bytes=at,
    )


def index_json(shards: list[Shard]) -> dict[str, Any]:
    """Return the model.safetensors.index.json over ``shards``."""
    count = sum(math.prod(shape) for shard in shards for shape in shard.tensors.values())
    return {
        "metadata": {
            "total_parameters": count,
            "total_size": sum(shard.data_bytes for shard in shards),
        },
        "weight_map": {name: shard.key for shard in shards for name in shard.tensors},
    }
