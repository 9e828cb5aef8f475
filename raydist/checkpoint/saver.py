# SPDX-License-Identifier: Apache-2.0
"""Saving: every rank writes its object, rank 0 writes the manifest and commits, all learn of it.

Synchronous: ``background`` runs it behind the training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from raydist.checkpoint import layout
from raydist.checkpoint.attempt import Attempt
from raydist.checkpoint.group import Group
from raydist.checkpoint.manifest import Manifest, Progress, checksum
from raydist.checkpoint.objects import DataObject, StoredRange, describe, encode
from raydist.checkpoint.prune import PruneOutcome, Pruner
from raydist.checkpoint.ranges import LocalRange, TensorSpec
from raydist.checkpoint.snapshot import Snapshot
from raydist.errors import CheckpointError, FencedError, RaydistError
from raydist.storage import ObjectStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """What every manifest of a run repeats about it."""

    run: str
    strategy: str
    precision: str
    config_hash: str
    corpus: str
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOutcome:
    """How a save ended, the same on every rank.

    Fields:
        manifest_key: Of the commit; empty when the save was abandoned.
        why: Reason of an abandoned save.
        seconds: From the call to the agreement, on this rank.
        pruned: What retention did after it; None where it was not asked: but on rank 0.
    """

    step: int
    committed: bool
    manifest_key: str = ""
    why: str = ""
    seconds: float = 0.0
    pruned: PruneOutcome | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A rank's object before it is written: its bytes, what lies where, and of which tensors."""

    data: memoryview
    stored: dict[str, StoredRange]
    specs: list[TensorSpec]


class Saver:
    """The saves of one attempt, one at a time. All ranks hold one; rank 0's has the journal."""

    def __init__(
        self,
        *,
        store: ObjectStore,
        group: Group,
        attempt_number: int,
        attempt: Attempt | None,
        identity: RunIdentity,
        max_abandoned: int,
        pruner: Pruner | None = None,
    ) -> None:
        self._store = store
        self._group = group
        self._attempt_number = attempt_number
        self._attempt = attempt
        self._identity = identity
        self._max_abandoned = max_abandoned
        self._pruner = pruner
        self._folder = layout.Folder(attempt=attempt_number, step=-1)
        self._abandoned_in_a_row = 0

    def save(
        self,
        ranges: Sequence[LocalRange] | RaydistError,
        *,
        progress: Progress,
        scalars: dict[str, float],
    ) -> SaveOutcome:
        """Write and commit one checkpoint out of live state. All ranks; a barrier.

        Args:
            ranges: This rank's ranges, or the error that kept it from having any: a rank that
                failed takes part in the agreement like the others.
            progress: How far the run has come; the same on every rank.
            scalars: Optimizer scalars; rank 0's are kept.

        Raises:
            FencedError: Another attempt holds the run.
            CheckpointError: ``max_abandoned`` saves in a row came to nothing.
        """

        def part() -> _Part:
            if isinstance(ranges, RaydistError):
                raise ranges
            data, stored = encode(ranges)
            return _Part(data=memoryview(data), stored=stored, specs=[r.spec for r in ranges])

        return self._save(part, progress=progress, scalars=scalars)

    def persist(
        self,
        snapshot: Snapshot | RaydistError,
        *,
        progress: Progress,
        scalars: dict[str, float],
    ) -> SaveOutcome:
        """Check, write and commit what a snapshot holds. All ranks; a barrier.

        State that is not finite abandons the save, as any other failure of a rank does. The
        arguments are those of ``save``.

        Raises:
            FencedError: Another attempt holds the run.
            CheckpointError: ``max_abandoned`` saves in a row came to nothing.
        """

        def part() -> _Part:
            if isinstance(snapshot, RaydistError):
                raise snapshot
            snapshot.check_finite()
            held = snapshot.layout
            specs = [r.spec for r in held.ranges]
            return _Part(data=snapshot.data, stored=held.stored, specs=specs)

        return self._save(part, progress=progress, scalars=scalars)

    def _save(
        self, part: Callable[[], _Part], *, progress: Progress, scalars: dict[str, float]
    ) -> SaveOutcome:
        begun = time.monotonic()
        again = self._folder.save + 1 if self._folder.step == progress.step else 1
        self._folder = replace(self._folder, step=progress.step, save=again)
        report = self._write(part)
        reports = self._group.gather(report)
        verdict: dict[str, Any] = {}
        if reports is not None:
            verdict = self._conclude(reports, progress=progress, scalars=scalars)
        verdict = self._group.broadcast(verdict)
        if "fenced" in verdict:
            raise FencedError(**verdict["fenced"])
        outcome = SaveOutcome(step=progress.step, seconds=time.monotonic() - begun, **verdict)
        self._abandoned_in_a_row = 0 if outcome.committed else self._abandoned_in_a_row + 1
        if self._abandoned_in_a_row >= self._max_abandoned:
            raise CheckpointError(
                problem=f"{self._abandoned_in_a_row} saves in a row were abandoned, the last at "
                f"step {progress.step}: {outcome.why}",
                way_out="Mend the storage, or raise checkpoint.max_abandoned.",
            )
        if outcome.committed and self._pruner is not None:
            outcome = replace(outcome, pruned=self._pruner.after_commit())
        return outcome

    def _write(self, part: Callable[[], _Part]) -> dict[str, Any]:
        rank, world_size = self._group.rank, self._group.world_size
        step = self._folder.step
        key = layout.part_key(step, self._attempt_number, rank, world_size, self._folder.save)
        try:
            own = part()
            written = describe(key, own.data)
            self._store.put(key, own.data)
        except (RaydistError, MemoryError) as error:
            logger.info("rank %d could not save step %d: %s", rank, step, error)
            return {"why": f"rank {rank}: {str(error) or repr(error)}"}
        return {
            "object": asdict(written),
            "ranges": {k: (r.offset, r.length, r.byte_start) for k, r in own.stored.items()},
            # Rank 0 knows every tensor but those that are another rank's alone.
            "own": {
                spec.key: (spec.shape, spec.dtype)
                for spec in own.specs
                if spec.key.startswith("rng/") or rank == 0
            },
        }

    def _conclude(
        self, reports: list[Any], *, progress: Progress, scalars: dict[str, float]
    ) -> dict[str, Any]:
        """Commit or abandon on rank 0; whatever comes of it is for all ranks to hear."""
        step = progress.step
        key = layout.manifest_key(step, self._attempt_number, self._folder.save)
        for rank, report in enumerate(reports):
            if report is None:
                reports[rank] = {"why": f"rank {rank} did not report in time"}
        ranks = [rank for rank, report in enumerate(reports) if "why" in report]
        whys = [reports[rank]["why"] for rank in ranks]
        raw = b""
        if self._attempt is None:
            return {"committed": False, "why": "rank 0 holds no attempt, so it cannot commit"}
        try:
            if not ranks:
                try:
                    raw = self._put_manifest(key, reports, progress=progress, scalars=scalars)
                except (RaydistError, MemoryError) as error:
                    ranks, whys = [0], [f"rank 0: {str(error) or repr(error)}"]
            if ranks:
                self._attempt.abandon(step=step, why="; ".join(whys), ranks=ranks)
            else:
                self._attempt.commit(
                    step=step, manifest_key=key, manifest_bytes=len(raw), crc32c=checksum(raw)
                )
        except FencedError as error:
            return {"fenced": {f.name: getattr(error, f.name) for f in fields(error)}}
        except RaydistError as error:
            whys.append(f"rank 0: {error}")
        if whys:
            logger.info("step %d is not committed: %s", step, "; ".join(whys))
            return {"committed": False, "why": "; ".join(whys)}
        return {"committed": True, "manifest_key": key}

    def _put_manifest(
        self,
        key: str,
        reports: list[dict[str, Any]],
        *,
        progress: Progress,
        scalars: dict[str, float],
    ) -> bytes:
        manifest = self._manifest(reports, progress=progress, scalars=scalars)
        manifest.check()
        raw = manifest.encode()
        self._store.put(key, raw)
        return raw

    def _manifest(
        self, reports: list[dict[str, Any]], *, progress: Progress, scalars: dict[str, float]
    ) -> Manifest:
        tensors: dict[str, TensorSpec] = {}
        ranges: dict[str, list[tuple[int, StoredRange]]] = {}
        objects: list[DataObject] = []
        for index, report in enumerate(reports):
            objects.append(DataObject(**report["object"]))
            for key, (shape, dtype) in report["own"].items():
                tensors.setdefault(key, TensorSpec(key=key, shape=tuple(shape), dtype=dtype))
            for key, (offset, length, start) in report["ranges"].items():
                stored = StoredRange(offset=offset, length=length, byte_start=start)
                ranges.setdefault(key, []).append((index, stored))
        return Manifest(
            run=self._identity.run,
            attempt=self._attempt_number,
            world_size=self._group.world_size,
            strategy=self._identity.strategy,
            precision=self._identity.precision,
            config_hash=self._identity.config_hash,
            corpus=self._identity.corpus,
            created_unix_s=time.time(),
            versions=self._identity.versions,
            progress=progress,
            scalars=scalars,
            tensors=tensors,
            objects=tuple(objects),
            ranges={key: tuple(stored) for key, stored in ranges.items()},
        )
