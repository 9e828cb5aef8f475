# SPDX-License-Identifier: Apache-2.0
"""A committed checkpoint's weights as a directory that ``from_pretrained`` loads, by streaming."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from raydist.checkpoint.float_bits import FLOATS, from_float32, largest_finite, to_float32
from raydist.checkpoint.huggingface_files import CONFIG_KEY, INDEX_KEY
from raydist.checkpoint.huggingface_shards import Shape, Shard, index_json, plan_shards
from raydist.checkpoint.manifest import Manifest
from raydist.checkpoint.ranges import DTYPE_BYTES, WantedRange
from raydist.checkpoint.reads import plan_reads, read_spans
from raydist.errors import CheckpointError, ConfigError, ObjectMissingError
from raydist.storage import ObjectStore
from raydist.storage.sequential import sequential_writer

logger = logging.getLogger(__name__)

WINDOW_BYTES = 64 << 20
"""State read at a time; the next window is read while one is written."""
TOKENIZER_KEYS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""What transformers keeps of a tokenizer."""

_SLICE = 1 << 20
_NUM_SHOWN = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What an export wrote.

    Fields:
        bytes: Of all weight files.
        bytes_read: From the checkpoint, whole blocks.
    """

    files: tuple[str, ...]
    tensors: int
    parameters: int
    bytes: int
    bytes_read: int


def export_weights(
    *,
    source: ObjectStore,
    manifest: Manifest,
    target: ObjectStore,
    shapes: Mapping[str, Shape],
    dtype: str,
    shard_bytes: int,
    document: dict[str, Any],
    tokenizer: ObjectStore | None = None,
    overwrite: bool = False,
    window_bytes: int = WINDOW_BYTES,
) -> Exported:
    """Write sharded safetensors, index, tokenizer and, last of all, config.json.

    Every block is verified as it is read. Memory is a few windows, whatever the model's size.
    Without its config.json a directory is not loaded, so one that was left half-written is not.

    Args:
        source: Rooted at the run.
        manifest: A committed checkpoint of it.
        target: Rooted at the directory to write.
        shapes: Every parameter of the model, by name: exactly these are exported.
        dtype: F32, BF16 or F16; rounded to nearest, ties to even.
        shard_bytes: Largest file, unless one tensor is larger.
        document: The config.json.
        tokenizer: Rooted at a directory whose tokenizer files are copied.
        overwrite: Whether the target may hold an earlier export, which is removed first.
        window_bytes: State read at a time; at least the checkpoint's largest block, so that no
            block is read more than twice.

    Raises:
        CheckpointError: The checkpoint lacks a parameter, has others, or has one of another shape,
            without elements, or with a value that ``dtype`` cannot hold.
        CheckpointCorruptError: An object is missing, short or altered.
        ConfigError: The target is not empty, or there is no tokenizer.
        StorageError: A store failed.
    """
    check_parameters(manifest, shapes)
    shards = plan_shards(shapes, dtype=dtype, shard_bytes=shard_bytes)
    tokenizer_files = _tokenizer_files(tokenizer)
    _clear(target, overwrite=overwrite)
    bytes_read = 0
    window_bytes = max(window_bytes, *(o.block_bytes for o in manifest.objects))
    for shard in shards:
        bytes_read += _write_shard(
            source, manifest, target, shard, dtype=dtype, window_bytes=window_bytes
        )
        logger.info("%s: %d bytes", shard.key, shard.bytes)
    for key, data in tokenizer_files.items():
        target.put(key, data)
    if len(shards) > 1:
        target.put(INDEX_KEY, _json(index_json(shards)))
    for shard in shards:
        size = target.size(shard.key)
        if size != shard.bytes:
            raise CheckpointError(
                problem=f"{shard.key} has {size} bytes after it was written, {shard.bytes} are due."
            )
    target.put(CONFIG_KEY, _json(document))
    return Exported(
        files=tuple(shard.key for shard in shards),
        tensors=len(shapes),
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        bytes=sum(shard.bytes for shard in shards),
        bytes_read=bytes_read,
    )


def check_parameters(manifest: Manifest, shapes: Mapping[str, Shape]) -> None:
    """Prove that a checkpoint holds exactly the model's parameters, whole.

    Raises:
        CheckpointError: It does not; the first few by name.
    """
    there = {
        key.removeprefix("master/"): spec
        for key, spec in manifest.tensors.items()
        if key.startswith("master/")
    }
    wrong = [f"{name} is missing" for name in shapes if name not in there]
    wrong += [f"{name} is not of the model" for name in there if name not in shapes]
    for name in shapes.keys() & there.keys():
        spec = there[name]
        if spec.shape != shapes[name]:
            wrong.append(f"{name} is {list(spec.shape)}, not {list(shapes[name])}")
        elif not spec.numel:
            wrong.append(f"{name} has no elements")
        elif spec.dtype not in FLOATS:
            wrong.append(f"{name} is {spec.dtype}")
    if wrong:
        raise CheckpointError(
            problem=f"The checkpoint of step {manifest.progress.step} does not hold the model of "
            f"the run's configuration: {'; '.join(wrong[:_NUM_SHOWN])}"
            f"{f'; and {len(wrong) - _NUM_SHOWN} more' if len(wrong) > _NUM_SHOWN else ''}.",
            way_out="Only models of the architectures that model.architecture names are exported.",
        )


def _tokenizer_files(tokenizer: ObjectStore | None) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    if tokenizer is None:
        return found
    for key in TOKENIZER_KEYS:
        try:
            found[key] = tokenizer.get(key)
        except ObjectMissingError:
            continue
    if not found:
        raise ConfigError(
            problem=f"There is no tokenizer at {tokenizer!r}.",
            way_out=f"Name a directory that has {', '.join(TOKENIZER_KEYS[:3])} or the like.",
        )
    return found


def _clear(target: ObjectStore, *, overwrite: bool) -> None:
    """Make room: refuse what is there, or remove an earlier export, its config.json first.

    Raises:
        ConfigError: Something is there, and may not be removed.
    """
    there = [key for key, _ in target.list("")]
    if there and not overwrite:
        raise ConfigError(
            problem=f"The target is not empty: {', '.join(there[:3])}.",
            way_out="Choose another --to, or say --overwrite.",
        )
    ours = [key for key in there if "/" not in key and key.startswith("model")]
    for key in (CONFIG_KEY, INDEX_KEY, *(k for k in ours if k.endswith(".safetensors"))):
        if key in there:
            target.delete(key)


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=2).encode() + b"\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Window:
    """Consecutive ranges of a shard's tensors that are read together."""

    ranges: tuple[WantedRange, ...]


def _windows(manifest: Manifest, shard: Shard, window_bytes: int) -> Iterator[_Window]:
    held: list[WantedRange] = []
    room = window_bytes
    for name in shard.tensors:
        spec = manifest.tensors[f"master/{name}"]
        width = DTYPE_BYTES[spec.dtype]
        offset = 0
        while offset < spec.numel:
            length = min(spec.numel - offset, room // width)
            if length:
                held.append(WantedRange(spec=spec, offset=offset, length=length))
                offset += length
                room -= length * width
            if room < width:
                yield _Window(ranges=tuple(held))
                held, room = [], window_bytes
    if held:
        yield _Window(ranges=tuple(held))


def _write_shard(
    source: ObjectStore,
    manifest: Manifest,
    target: ObjectStore,
    shard: Shard,
    *,
    dtype: str,
    window_bytes: int,
) -> int:
    """Stream one file; return the bytes read for it."""

    def read(window: _Window) -> tuple[_Window, dict[str, memoryview], int]:
        buffers = {
            r.spec.key: memoryview(bytearray(r.length * DTYPE_BYTES[r.spec.dtype]))
            for r in window.ranges
        }
        spans = plan_reads(manifest, window.ranges)
        return window, buffers, read_spans(source, manifest, spans, buffers)

    bytes_read = 0
    windows = _windows(manifest, shard, window_bytes)
    with (
        sequential_writer(target, shard.key) as write,
        ThreadPoolExecutor(1, "raydist-export") as reader,
    ):
        write(shard.header)
        first = next(windows, None)
        ahead = reader.submit(read, first) if first else None
        while ahead is not None:
            window, buffers, count = ahead.result()
            following = next(windows, None)
            ahead = reader.submit(read, following) if following else None
            bytes_read += count
            for item in window.ranges:
                _write_range(write, item, buffers[item.spec.key], dtype)
    return bytes_read


def _write_range(
    write: Callable[[Any], None], item: WantedRange, data: memoryview, dtype: str
) -> None:
    """Convert and write a range in slices, so that no second copy of it comes to be.

    Raises:
        CheckpointError: A value is not finite, or beyond what ``dtype`` holds.
    """
    limit, width = largest_finite(dtype), DTYPE_BYTES[item.spec.dtype]
    for at in range(0, item.length, _SLICE):
        raw = data[at * width : (at + _SLICE) * width]
        values = to_float32(raw, item.spec.dtype)
        # A NaN fails every comparison.
        if not (values.min() >= -limit and values.max() <= limit):
            raise CheckpointError(
                problem=f"{item.spec.key} has a value in elements [{item.offset + at}, "
                f"{item.offset + at + len(values)}) that {dtype} cannot hold.",
                way_out="Export with --dtype bf16 or fp32.",
            )
        write(from_float32(values, dtype).data)
