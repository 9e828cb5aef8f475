# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds, in a summary, and how two of them differ."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from raydist.checkpoint.manifest import Manifest
from raydist.checkpoint.ranges import DTYPE_BYTES, TensorSpec, WantedRange
from raydist.checkpoint.reads import plan_reads, read_spans
from raydist.storage import ObjectStore

_WINDOW_BYTES = 32 << 20
_NUMPY = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I64": "<i8", "I32": "<i4", "U8": "u1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One checkpoint's manifest, for people.

    Fields:
        tensors_by_kind, bytes_by_kind: Logical tensors, their bytes; `rng/cpu` counts as `rng`.
        rank_bytes: Of each data object, in rank order.
    """

    run: str
    attempt: int
    world_size: int
    strategy: str
    precision: str
    created_unix_s: float
    config_hash: str
    corpus: str
    versions: dict[str, str]
    progress: dict[str, int]
    scalars: dict[str, float]
    tensors_by_kind: dict[str, int]
    bytes_by_kind: dict[str, int]
    rank_bytes: tuple[int, ...]
    total_bytes: int


def summarize(manifest: Manifest) -> Summary:
    """Return the summary of a manifest. Pure."""
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for spec in manifest.tensors.values():
        kind = spec.key.partition("/")[0]
        counts[kind] = counts.get(kind, 0) + 1
        sizes[kind] = sizes.get(kind, 0) + spec.numel * DTYPE_BYTES[spec.dtype]
    same = {
        field.name: getattr(manifest, field.name)
        for field in dataclasses.fields(Summary)
        if field.name not in ("progress", "tensors_by_kind", "bytes_by_kind", "rank_bytes")
    }
    return Summary(
        **same,
        progress=dataclasses.asdict(manifest.progress),
        tensors_by_kind=counts,
        bytes_by_kind=sizes,
        rank_bytes=tuple(info.bytes for info in manifest.objects),
    )


def diff_manifests(a: Manifest, b: Manifest) -> dict[str, tuple[Any, Any]]:
    """Return what differs besides the values: name -> (in a, in b), None where there is none.

    Pure. Facts by their manifest name, versions as `versions.torch`, progress as
    `progress.step`, tensors by key with `shape dtype`.
    """
    left, right = _facts(a), _facts(b)
    return {
        key: (left.get(key), right.get(key))
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key)
    }


def _facts(manifest: Manifest) -> dict[str, Any]:
    facts: dict[str, Any] = {
        name: getattr(manifest, name)
        for name in ("run", "attempt", "world_size", "strategy", "precision", "config_hash",
                     "corpus", "format")
    }  # fmt: skip
    for name, values in (
        ("progress", dataclasses.asdict(manifest.progress)),
        ("scalars", manifest.scalars),
        ("versions", manifest.versions),
    ):
        facts |= {f"{name}.{key}": value for key, value in values.items()}
    facts |= {key: f"{list(s.shape)} {s.dtype}" for key, s in manifest.tensors.items()}
    return facts


@dataclass(frozen=True, kw_only=True, slots=True)
class Distance:
    """How far one tensor's values lie apart.

    Fields:
        max_abs: Largest difference; infinite where one is NaN and the other not.
        num_different: Elements whose values differ.
    """

    key: str
    max_abs: float
    num_different: int
    numel: int


def measure_distances(store: ObjectStore, a: Manifest, b: Manifest) -> list[Distance]:
    """Compare the values of every tensor that both have in one shape and dtype, in key order.

    Reads both by range, a window at a time; every block is verified.

    Raises:
        CheckpointCorruptError: An object is missing, short or altered.
        StorageError: The store failed.
    """
    return [
        _distance(store, a, b, spec)
        for key, spec in sorted(a.tensors.items())
        if b.tensors.get(key) == spec
    ]


def _distance(store: ObjectStore, a: Manifest, b: Manifest, spec: TensorSpec) -> Distance:
    window = _WINDOW_BYTES // DTYPE_BYTES[spec.dtype]
    max_abs, num_different = 0.0, 0
    for offset in range(0, spec.numel, window):
        wanted = WantedRange(spec=spec, offset=offset, length=min(window, spec.numel - offset))
        left, right = (_read(store, manifest, wanted) for manifest in (a, b))
        with np.errstate(invalid="ignore"):  # NaN and infinities are told apart below
            apart = np.abs(left - right)
        is_equal = (left == right) | (np.isnan(left) & np.isnan(right))
        apart[is_equal] = 0.0
        apart[np.isnan(apart)] = math.inf
        max_abs = max(max_abs, float(apart.max(initial=0.0)))
        num_different += int(np.count_nonzero(~is_equal))
    return Distance(key=spec.key, max_abs=max_abs, num_different=num_different, numel=spec.numel)


def _read(store: ObjectStore, manifest: Manifest, wanted: WantedRange) -> np.ndarray:
    """Return the elements as float64 [length]; integers beyond 2**53 lose their last bits."""
    dtype = wanted.spec.dtype
    buffer = memoryview(bytearray(wanted.length * DTYPE_BYTES[dtype]))
    read_spans(store, manifest, plan_reads(manifest, [wanted]), {wanted.spec.key: buffer})
    if dtype == "BF16":
        bits = np.frombuffer(buffer, "<u2").astype("<u4") << 16
        return bits.view("<f4").astype(np.float64)
    return np.frombuffer(buffer, _NUMPY.get(dtype, "u1")).astype(np.float64)
