# SPDX-License-Identifier: Apache-2.0
"""A toy run whose saves go on behind it, and a store that can be held up.

Faked: the ranks (threads of one process). Real: everything in raydist.checkpoint, and its threads.
"""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Callable, Iterator, Mapping

from checkpoint_scenario import (
    IDENTITY,
    SPECS,
    State,
    local_ranges,
    progress_at,
    random_state,
    slice_bytes,
)

from raydist.checkpoint.attempt import Attempt, open_attempt
from raydist.checkpoint.background import BackgroundSaver
from raydist.checkpoint.ranges import WantedRange
from raydist.checkpoint.saver import Saver
from raydist.checkpoint.snapshot import Allocate, touched_memory
from raydist.errors import RaydistError
from raydist.storage import ObjectStore
from raydist.testing.fake_clock import FakeClock
from raydist.testing.thread_group import ThreadGroup


def finite_state(seed: int) -> State:
    """Random numbers, where random bytes would be NaN now and then."""
    source = random.Random(seed)
    state = {}
    for spec, raw in random_state(seed, SPECS).items():
        floats = [struct.pack("<f", source.gauss(0, 1)) for _ in range(spec.numel)]
        kinds = {"F32": floats, "BF16": [one[2:] for one in floats]}
        state[spec] = b"".join(kinds[spec.dtype]) if spec.dtype in kinds else raw
    return state


class GatedStore:
    """Holds puts of data objects until ``gate`` is set."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.gate = threading.Event()
        self.reached = threading.Event()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        if key.endswith(".safetensors"):
            self.reached.set()
            assert self.gate.wait(20)
        self.inner.put(key, data, if_absent=if_absent)

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        return self.inner.get(key, start=start, length=length)

    def size(self, key: str) -> int | None:
        return self.inner.size(key)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        self.inner.delete(key)


class AsyncRun:
    """One attempt whose ranks save in the background.

    Args:
        rank_stores: Ranks that reach the storage another way than ``store``.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        world_size: int = 2,
        max_abandoned: int = 3,
        driver: str = "driver-a",
        takeover: bool = False,
        rank_stores: Mapping[int, ObjectStore] | None = None,
        allocate: Allocate = touched_memory,
    ) -> None:
        stores = dict(rank_stores or {})
        self.world_size = world_size
        self.training = ThreadGroup(world_size)
        self.saving = ThreadGroup(world_size)
        self.attempt: Attempt = open_attempt(
            run="toy", store=stores.get(0, store), driver=driver, clock=FakeClock(),
            takeover=takeover,
        )  # fmt: skip
        self.attempt.release()
        self.committed: list[tuple[int, int]] = []
        self.savers = [
            BackgroundSaver(
                saver=Saver(
                    store=stores.get(rank, store),
                    group=self.saving.ranks[rank],
                    attempt_number=self.attempt.number,
                    attempt=self.attempt if rank == 0 else None,
                    identity=IDENTITY,
                    max_abandoned=max_abandoned,
                ),
                group=self.training.ranks[rank],
                ranges=self.wanted(rank),
                committed=lambda step, key, rank=rank: self.committed.append((rank, step)),
                allocate=allocate,
            )
            for rank in range(world_size)
        ]
        for saver in self.savers:
            assert saver.wait(20)  # its memory is there

    def wanted(self, rank: int) -> list[WantedRange]:
        return [
            WantedRange(spec=r.spec, offset=r.offset, length=r.length)
            for r in local_ranges(random_state(0), rank=rank, world_size=self.world_size)
        ]

    def export(self, state: State, rank: int, step: int) -> Callable[..., dict[str, float]]:
        """Copy one rank's slices of ``state``."""

        def copy(views: dict[str, memoryview]) -> dict[str, float]:
            for item in self.wanted(rank):
                raw = state.get(item.spec, bytes([rank] * item.nbytes))
                views[item.spec.key][:] = slice_bytes(item.spec, raw, item.offset, item.length)
            return {"adam_step": float(step)}

        return copy

    def begin(
        self, state: State, step: int, *, errors: Mapping[int, RaydistError] | None = None
    ) -> None:
        """Save on every rank, and come back while it is being written."""
        for rank, saver in enumerate(self.savers):
            export = self.export(state, rank, step)
            if errors and rank in errors:
                export = _raising(errors[rank])
            saver.save(export, progress=progress_at(step))

    def settle(self) -> None:
        for saver in self.savers:
            assert saver.wait(20)

    def agree(self, decide: Callable[[bool], object] = lambda is_busy: is_busy) -> list[object]:
        """What every rank is told, or its error."""
        return list(self.training.outcomes(lambda m: self.savers[m.rank].agree(decide)))


def _raising(error: RaydistError) -> Callable[..., dict[str, float]]:
    def export(views: dict[str, memoryview]) -> dict[str, float]:
        raise error

    return export
