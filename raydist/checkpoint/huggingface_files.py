# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face directory of safetensors files, as its index and headers describe it.

Such files carry no checksums: what can be proved is that the headers make sense and that every
file is exactly as long as its header says.
"""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from raydist.checkpoint.ranges import DTYPE_BYTES
from raydist.errors import CheckpointCorruptError, ConfigError, ObjectMissingError
from raydist.storage import ObjectStore

CONFIG_KEY = "config.json"
SINGLE_KEY = "model.safetensors"
INDEX_KEY = "model.safetensors.index.json"

_FIRST_READ_BYTES = 256 << 10
_MAX_HEADER_BYTES = 100 << 20  # as the safetensors package limits it
_READERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file: ``byte_start`` is its first byte in the file."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    byte_start: int

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFiles:
    """What a directory holds.

    Fields:
        where: Its location, for messages.
        document: Its config.json; empty when it has none.
    """

    where: str
    tensors: dict[str, StoredTensor]
    document: dict[str, Any]

    @property
    def is_tied(self) -> bool | None:
        """Whether config.json says that the output projection is the embedding; None: no word."""
        return self.document.get("tie_word_embeddings")


def read_weight_files(store: ObjectStore, *, where: str) -> WeightFiles:
    """Read config, index and headers of the directory at the root of ``store``.

    Raises:
        ConfigError: There are no safetensors weights there, or the index is no index.
        CheckpointCorruptError: A file is missing, truncated, or its header makes no sense.
    """
    weight_map: dict[str, str] | None = None
    names = [SINGLE_KEY]
    if store.size(SINGLE_KEY) is None:
        weight_map = _read_index(store, where)
        names = sorted(set(weight_map.values()))
    with ThreadPoolExecutor(_READERS) as pool:
        found = list(pool.map(lambda name: _read_header(store, name), names))
    tensors = {tensor.name: tensor for file in found for tensor in file}
    if weight_map is not None:
        for name, file in weight_map.items():
            if name not in tensors or tensors[name].file != file:
                raise CheckpointCorruptError(key=file, reason=f"the index promises {name} in it")
    return WeightFiles(where=where, tensors=tensors, document=_read_document(store, where))


def _read_document(store: ObjectStore, where: str) -> dict[str, Any]:
    try:
        return dict(json.loads(store.get(CONFIG_KEY)))
    except ObjectMissingError:
        return {}
    except (ValueError, TypeError) as error:
        raise ConfigError(problem=f"{where}/{CONFIG_KEY} cannot be read: {error}.") from error


def _read_index(store: ObjectStore, where: str) -> dict[str, str]:
    try:
        weight_map = json.loads(store.get(INDEX_KEY))["weight_map"]
        if not weight_map or any(
            not isinstance(file, str) or "/" in file for file in weight_map.values()
        ):
            raise ValueError("its weight_map does not name files beside it")
        return dict(weight_map)
    except ObjectMissingError as error:
        raise ConfigError(
            problem=f"There is neither {SINGLE_KEY} nor {INDEX_KEY} at {where}.",
            way_out="Name a directory or s3:// prefix that save_pretrained wrote; the Hub's are "
            "downloaded first.",
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(problem=f"{where}/{INDEX_KEY} cannot be read: {error!r}.") from error


def _read_header(store: ObjectStore, file: str) -> list[StoredTensor]:
    size = store.size(file)
    if size is None:
        raise CheckpointCorruptError(key=file, reason="the file is missing")
    first = store.get(file, start=0, length=_FIRST_READ_BYTES)
    length = int.from_bytes(first[:8], "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise CheckpointCorruptError(
            key=file, reason=f"{size} bytes cannot hold a header of {length}: truncated, or not "
            "safetensors",
        )  # fmt: skip
    raw = first[8 : 8 + length]
    if len(raw) < length:
        raw += store.get(file, start=8 + len(raw), length=length - len(raw))
    return parse_header(raw, file=file, size_bytes=size)


def parse_header(raw: bytes, *, file: str, size_bytes: int) -> list[StoredTensor]:
    """Return the tensors that a safetensors header names.

    Args:
        raw: The header's JSON.
        file: The file's name.
        size_bytes: Of the whole file.

    Raises:
        CheckpointCorruptError: Not such a header, an extent that is not its tensor's, extents that
            do not fill the file without gap or overlap, or a file shorter or longer than that.
    """
    start = 8 + len(raw)
    tensors: list[tuple[int, int, StoredTensor]] = []
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, end = entry["data_offsets"]
            tensor = StoredTensor(
                name=name,
                file=file,
                dtype=entry["dtype"],
                shape=tuple(int(size) for size in entry["shape"]),
                byte_start=start + first,
            )
            tensors.append((first, end, tensor))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorruptError(key=file, reason=f"no header: {error!r}") from error
    at = 0
    for first, end, tensor in sorted(tensors, key=lambda item: item[:2]):
        width = DTYPE_BYTES.get(tensor.dtype)
        if first != at or end < first or min(tensor.shape, default=0) < 0:
            raise CheckpointCorruptError(
                key=file, reason=f"{tensor.name} lies at [{first}, {end}), where {at} is next"
            )
        if width is not None and end - first != tensor.numel * width:
            raise CheckpointCorruptError(
                key=file,
                reason=f"{tensor.name} {list(tensor.shape)} {tensor.dtype} has {end - first} bytes",
            )
        at = end
    if start + at != size_bytes:
        raise CheckpointCorruptError(
            key=file, reason=f"{size_bytes} bytes where its header promises {start + at}"
        )
    return [tensor for _, _, tensor in tensors]
