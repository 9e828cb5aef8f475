# SPDX-License-Identifier: Apache-2.0
"""Ranges of flattened tensors: who holds which, and whether they cover the whole. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from raydist.errors import CheckpointError

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
"""safetensors dtype names and their bytes an element."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A logical tensor: what all its ranges together are.

    Fields:
        key: `<kind>/<fully.qualified.name>`; kind is master, exp_avg, exp_avg_sq, buffer, ...
        shape: As the model declares it; its elements are numbered row-major.
        dtype: safetensors name (`F32`).
    """

    key: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalRange:
    """Elements [offset, offset + length) of a tensor, and the rank's own bytes for them.

    ``data`` is the source of a save and the destination of a restore: a writable, contiguous
    buffer of length x element size bytes.
    """

    spec: TensorSpec
    offset: int
    length: int
    data: memoryview


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedRange:
    """Elements [offset, offset + length) of a tensor that a rank needs."""

    spec: TensorSpec
    offset: int
    length: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.length * DTYPE_BYTES[self.spec.dtype]


def partition(numel: int, *, world_size: int, rank: int) -> tuple[int, int]:
    """Return (offset, length) of a rank's slice of ``numel`` elements.

    Slices have ceil(numel / world_size) elements; the last ones may be short or empty. This is
    DeepSpeed ZeRO-3's own partition, and how replicated state is split over its holders.
    """
    size = -(-numel // world_size)
    offset = min(numel, rank * size)
    return offset, min(size, numel - offset)


def check_cover(key: str, numel: int, ranges: Iterable[tuple[int, int]]) -> None:
    """Prove that (offset, length) ranges cover [0, numel) exactly once.

    Raises:
        CheckpointError: A gap, an overlap or an overrun, with the element where it begins.
    """
    covered = 0
    for offset, length in sorted(r for r in ranges if r[1]):
        if length < 0:
            raise CheckpointError(problem=f"{key}: a range of {length} elements at {offset}.")
        if offset != covered:
            what = "is missing" if offset > covered else "stands twice"
            raise CheckpointError(
                problem=f"{key}: element {min(offset, covered)} of {numel} {what} in the ranges."
            )
        covered += length
    if covered != numel:
        raise CheckpointError(problem=f"{key}: ranges cover {covered} of {numel} elements.")
