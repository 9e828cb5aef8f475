# SPDX-License-Identifier: Apache-2.0
"""A rank's state in host memory of its own, laid out as the object that it becomes.

A save is one copy of each range into it: no allocation, no page fault, no encoding. The memory
is used again by every save, and is what a checkpoint costs a rank's host.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import numpy as np

from raydist.checkpoint.finite import find_nonfinite
from raydist.checkpoint.objects import lay_out
from raydist.checkpoint.ranges import DTYPE_BYTES, WantedRange
from raydist.errors import CheckpointError

Allocate = Callable[[int], memoryview]
"""Gives writable memory of so many bytes, its pages present."""


def touched_memory(num_bytes: int) -> memoryview:
    """Return anonymous memory whose pages are present.

    Pages that come with the first write make that save several times as long as a later one
    (docs/benchmarks.md). Releases the GIL while it waits for them.
    """
    memory = mmap.mmap(-1, num_bytes)
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 0
    return memoryview(memory)


class Snapshot:
    """One rank's ranges as one object.

    Fields:
        layout: Where each range lies.
        data: The object's bytes.
        views: The part of ``data`` that each tensor key has: what a save writes to.

    Args:
        ranges: What the rank holds; laid out with the widest elements first, so that each
            element is aligned.
        allocate: Where the memory comes from.
    """

    def __init__(
        self, ranges: Sequence[WantedRange], *, allocate: Allocate = touched_memory
    ) -> None:
        aligned = sorted(ranges, key=lambda r: -DTYPE_BYTES[r.spec.dtype])
        self.layout = lay_out(aligned)
        self.data = allocate(self.layout.bytes)
        self.data[: len(self.layout.header)] = self.layout.header
        self.views = self.layout.views(self.data)

    def check_finite(self) -> None:
        """Prove that no floating-point element is infinite or NaN.

        Raises:
            CheckpointError: One is; names the tensor and the element.
        """
        for item in self.layout.ranges:
            at = find_nonfinite(self.views[item.spec.key], item.spec.dtype)
            if at is not None:
                raise CheckpointError(
                    problem=f"{item.spec.key} is not finite in element {item.offset + at}; such "
                    "state is never saved.",
                    way_out="Resume from an earlier checkpoint with a lower "
                    "optimizer.learning_rate.",
                )
