# SPDX-License-Identifier: Apache-2.0
"""A rank's micro batches, read ahead of the steps that use them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from raydist.train.job import Batch
from raydist.world import BatchPlan


class Positions(Protocol):
    """Where token ids come from: ``raydist.data.Corpus`` or its like."""

    def batch(self, positions: range) -> Any:
        """Return token ids at global positions, int64 numpy [len(positions), sequence]."""
        ...


class BatchFeed:
    """Reads one rank's share of each global batch in a thread, ``depth`` steps ahead.

    The data's whole state is the position of the next step: a new feed at any position gives
    exactly what the old one would have.
    """

    def __init__(
        self,
        source: Positions,
        plan: BatchPlan,
        *,
        rank: int,
        start: int,
        num_steps: int,
        device: torch.device,
        depth: int = 2,
    ) -> None:
        self._source = source
        self._plan = plan
        self._rank = rank
        self._device = device
        self._queue: queue.Queue[list[Any] | Exception] = queue.Queue(depth)
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._read, args=(start, num_steps), name="raydist-feed", daemon=True
        )
        self._thread.start()

    def next(self) -> list[Batch]:
        """Return the next step's micro batches on the rank's device.

        Raises:
            DataError: The corpus could not be read.
        """
        item = self._queue.get()
        if isinstance(item, Exception):
            raise item
        return [{"tokens": torch.from_numpy(tokens).to(self._device)} for tokens in item]

    def close(self) -> None:
        """End the reading thread."""
        self._closing.set()
        self._thread.join()

    def _read(self, start: int, num_steps: int) -> None:
        try:
            for step in range(num_steps):
                first = start + step * self._plan.global_batch_size
                ranges = self._plan.positions(start=first, rank=self._rank)
                if not self._put([self._source.batch(positions) for positions in ranges]):
                    return
        except Exception as error:  # Raised again in the training thread by next().
            self._put(error)

    def _put(self, item: list[Any] | Exception) -> bool:
        return _until(self._closing, lambda: self._queue.put(item, timeout=0.1))


def _until(closing: threading.Event, put: Callable[[], None]) -> bool:
    while not closing.is_set():
        try:
            put()
        except queue.Full:
            continue
        return True
    return False
