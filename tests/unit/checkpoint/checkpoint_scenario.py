# SPDX-License-Identifier: Apache-2.0
"""A run in miniature for the checkpoint tests: state, its slices over ranks, saves, restores.

Faked: the ranks (threads of one process) and time. Real: everything in raydist.checkpoint.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from raydist.checkpoint.attempt import Attempt, open_attempt
from raydist.checkpoint.group import Group
from raydist.checkpoint.journal import Entry, Journal
from raydist.checkpoint.manifest import Manifest, Progress
from raydist.checkpoint.ranges import (
    DTYPE_BYTES,
    LocalRange,
    TensorSpec,
    WantedRange,
    partition,
)
from raydist.checkpoint.restore import Restored, restore
from raydist.checkpoint.saver import RunIdentity, SaveOutcome, Saver
from raydist.errors import RaydistError, StorageError
from raydist.storage import ObjectStore
from raydist.testing.fake_clock import FakeClock
from raydist.testing.thread_group import ThreadGroup

IDENTITY = RunIdentity(
    run="toy",
    strategy="ddp",
    precision="fp32",
    config_hash="cafe",
    corpus="c0de",
    versions={"raydist": "test"},
)
SPECS = (
    TensorSpec(key="master/embed.weight", shape=(7, 5), dtype="F32"),
    TensorSpec(key="exp_avg/embed.weight", shape=(7, 5), dtype="F32"),
    TensorSpec(key="master/norm.weight", shape=(2,), dtype="BF16"),
    TensorSpec(key="buffer/num_batches", shape=(), dtype="I64"),
    TensorSpec(key="buffer/mask", shape=(3, 1, 3), dtype="BOOL"),
    TensorSpec(key="buffer/none", shape=(0, 4), dtype="F32"),
)

State = dict[TensorSpec, bytes]


def random_state(seed: int, specs: Sequence[TensorSpec] = SPECS) -> State:
    source = random.Random(seed)
    return {spec: source.randbytes(spec.numel * DTYPE_BYTES[spec.dtype]) for spec in specs}


def slice_bytes(spec: TensorSpec, raw: bytes, offset: int, length: int) -> bytes:
    width = DTYPE_BYTES[spec.dtype]
    return raw[offset * width : (offset + length) * width]


def local_ranges(state: State, *, rank: int, world_size: int) -> list[LocalRange]:
    """What one rank saves: its slice of every tensor, and a tensor that it alone has."""
    own = TensorSpec(key=f"rng/cpu/rank-{rank:05d}-of-{world_size:05d}", shape=(11,), dtype="U8")
    ranges = []
    for spec, raw in {**state, own: bytes([rank] * 11)}.items():
        whole = spec is own
        offset, length = (
            (0, 11) if whole else partition(spec.numel, world_size=world_size, rank=rank)
        )
        data = memoryview(bytearray(slice_bytes(spec, raw, offset, length)))
        ranges.append(LocalRange(spec=spec, offset=offset, length=length, data=data))
    return ranges


def wanted_ranges(specs: Sequence[TensorSpec], *, rank: int, world_size: int) -> list[WantedRange]:
    return [
        WantedRange(spec=spec, offset=offset, length=length)
        for spec in specs
        for offset, length in [partition(spec.numel, world_size=world_size, rank=rank)]
    ]


def progress_at(step: int) -> Progress:
    return Progress(step=step, data_position=8 * step, epoch=0, tokens=64 * step, skipped_steps=0)


class ToyRun:
    """One attempt of a run on a store: a world of ranks that save and restore.

    Args:
        rank_stores: Ranks that reach the storage another way than ``store``.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        world_size: int = 2,
        driver: str = "driver-a",
        max_abandoned: int = 3,
        rank_stores: Mapping[int, ObjectStore] | None = None,
        takeover: bool = False,
    ) -> None:
        self.store = store
        self.world_size = world_size
        self.group = ThreadGroup(world_size)
        self._stores = dict(rank_stores or {})
        self.attempt: Attempt = open_attempt(
            run="toy",
            store=self._stores.get(0, store),
            driver=driver,
            clock=FakeClock(),
            takeover=takeover,
        )
        self.attempt.release()  # no lease thread: nothing here waits long enough for a beat
        self.savers = [
            Saver(
                store=self._stores.get(rank, store),
                group=member,
                attempt_number=self.attempt.number,
                attempt=self.attempt if rank == 0 else None,
                identity=IDENTITY,
                max_abandoned=max_abandoned,
            )
            for rank, member in enumerate(self.group.ranks)
        ]

    def save(
        self, state: State, step: int, *, errors: Mapping[int, RaydistError] | None = None
    ) -> list[SaveOutcome]:
        """Save on all ranks; those in ``errors`` report one instead of ranges."""
        return self.group.run(lambda member: self._save(member, state, step, errors or {}))

    def save_outcomes(
        self, state: State, step: int, *, errors: Mapping[int, RaydistError] | None = None
    ) -> list[SaveOutcome | BaseException]:
        """Like ``save``, with each rank's exception in its place."""
        return self.group.outcomes(lambda member: self._save(member, state, step, errors or {}))

    def _save(
        self, member: Group, state: State, step: int, errors: Mapping[int, RaydistError]
    ) -> SaveOutcome:
        ranges = local_ranges(state, rank=member.rank, world_size=self.world_size)
        return self.savers[member.rank].save(
            errors.get(member.rank, ranges),
            progress=progress_at(step),
            scalars={"adam_step": float(step)},
        )


def restore_member(
    store: ObjectStore, member: Group, specs: Sequence[TensorSpec]
) -> Restored | None:
    """Restore on one rank, beginning with the journal on rank 0 as a start does."""
    commit = newest_commit(store) if member.rank == 0 else None

    def wanted(manifest: Manifest) -> list[WantedRange]:
        return wanted_ranges(specs, rank=member.rank, world_size=member.world_size)

    return restore(store=store, group=member, commit=commit, wanted=wanted)


def restore_world(
    store: ObjectStore, world_size: int, specs: Sequence[TensorSpec] = SPECS
) -> list[Restored]:
    found = ThreadGroup(world_size).run(lambda member: restore_member(store, member, specs))
    assert all(one is not None for one in found)
    return [one for one in found if one is not None]


def newest_commit(store: ObjectStore) -> Entry | None:
    journal = Journal(store)
    return journal.newest_commit(journal.tail())


def assert_restored(found: Sequence[Restored], state: State) -> None:
    """Every rank has exactly its slice of ``state``."""
    for rank, restored in enumerate(found):
        expected = {
            item.spec.key: slice_bytes(item.spec, state[item.spec], item.offset, item.length)
            for item in wanted_ranges(list(state), rank=rank, world_size=len(found))
        }
        assert {key: bytes(data) for key, data in restored.buffers.items()} == expected


def entries(store: ObjectStore) -> list[Entry]:
    """The whole journal, in order."""
    journal, found = Journal(store), []
    while (entry := journal.read(len(found) + 1)) is not None:
        found.append(entry)
    return found


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request as a store received it."""

    operation: str
    key: str
    num_bytes: int = 0


@dataclass(kw_only=True)
class Fault:
    """Requests that go wrong: ``times`` of those of ``operation`` on keys with ``part``."""

    operation: str
    part: str = ""
    times: int = 1_000_000
    after: bool = False
    """Whether the request takes effect and only its reply is lost."""


class WatchedStore:
    """Passes requests on to a real store, notes them, and fails those it is told to."""

    def __init__(self, inner: ObjectStore, *faults: Fault) -> None:
        self.inner = inner
        self.requests: list[Request] = []
        self.faults = list(faults)
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        self._note("put", key, len(data))
        fault = self._fault("put", key)
        if fault is None or fault.after:
            self.inner.put(key, data, if_absent=if_absent)
        if fault is not None:
            raise StorageError(problem=f"injected: put {key}")

    def get(
        self,
        key: str,
        *,
        start: int = 0,
        length: int | None = None,
        into: memoryview | None = None,
    ) -> bytes | int:
        count = 0
        try:
            self._fail("get", key)
            if into is not None:
                count = self.inner.get(key, start=start, into=into)
                return count
            data = self.inner.get(key, start=start, length=length)
            count = len(data)
            return data
        finally:
            self._note("get", key, count)

    def size(self, key: str) -> int | None:
        self._note("size", key)
        self._fail("size", key)
        return self.inner.size(key)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        self._note("list", prefix)
        self._fail("list", prefix)
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        self._note("delete", key)
        self._fail("delete", key)
        self.inner.delete(key)

    def _note(self, operation: str, key: str, num_bytes: int = 0) -> None:
        with self._lock:
            self.requests.append(Request(operation=operation, key=key, num_bytes=num_bytes))

    def _fail(self, operation: str, key: str) -> None:
        if self._fault(operation, key) is not None:
            raise StorageError(problem=f"injected: {operation} {key}")

    def _fault(self, operation: str, key: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.operation == operation and fault.part in key and fault.times:
                    fault.times -= 1
                    return fault
        return None
