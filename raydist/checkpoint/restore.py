# SPDX-License-Identifier: Apache-2.0
"""Restoring: the newest valid checkpoint, agreed on by all ranks, read by range."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raydist.checkpoint.group import Group
from raydist.checkpoint.journal import Entry, Journal
from raydist.checkpoint.manifest import Manifest, checksum, decode
from raydist.checkpoint.ranges import DTYPE_BYTES, WantedRange
from raydist.checkpoint.reads import Span, plan_reads, read_spans
from raydist.errors import CheckpointCorruptError, CheckpointError, ObjectMissingError, RaydistError
from raydist.storage import ObjectStore

logger = logging.getLogger(__name__)
ReadSpans = Callable[[ObjectStore, Manifest, Sequence[Span], dict[str, memoryview]], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """A rank's state out of a checkpoint.

    Fields:
        buffers: Bytes of each wanted range, by tensor key.
        bytes_read: By this rank.
        skipped: Why newer checkpoints were passed over, newest first.
        steps_lost: Committed steps that are done again; known on rank 0.
    """

    manifest: Manifest
    buffers: dict[str, memoryview]
    bytes_read: int
    skipped: tuple[str, ...] = ()
    steps_lost: int = 0


def read_commit(store: ObjectStore, commit: Entry) -> tuple[Manifest, bytes]:
    """Return the manifest that a commit entry names, and its raw bytes.

    Raises:
        CheckpointCorruptError: It is missing or not what was committed.
    """
    key = commit.facts["manifest"]
    try:
        raw = store.get(key)
    except ObjectMissingError as error:
        raise CheckpointCorruptError(key=key, reason="the manifest is missing") from error
    due = commit.facts["manifest_bytes"], commit.facts["manifest_crc32c"]
    if (len(raw), checksum(raw)) != due:
        raise CheckpointCorruptError(key=key, reason="not the manifest that was committed")
    return decode(raw, where=key), raw


def restore(
    *,
    store: ObjectStore,
    group: Group,
    commit: Entry | None,
    wanted: Callable[[Manifest], list[WantedRange]],
    read: ReadSpans = read_spans,
) -> Restored | None:
    """Read the newest checkpoint that verifies on every rank. All ranks; a barrier.

    Rank 0 reads manifests and shares them. A checkpoint with a missing, short or altered
    object is passed over, loudly; one whose tensors are not the model's is an error.

    Args:
        store: Rooted at the run.
        group: All ranks.
        commit: Newest commit entry, on rank 0; None elsewhere.
        wanted: What this rank needs of a checkpoint.
        read: Fills buffers by a plan of reads, verifying every block.

    Returns:
        None when there is no commit.

    Raises:
        CheckpointError: No commit verifies, or the model is not the one saved.
    """
    skipped: list[str] = []
    newest_step = commit.facts["step"] if commit else 0
    candidate = commit
    while True:
        found: dict[str, Any] = {}
        if group.rank == 0:
            candidate, found = _find(store, candidate, is_next=bool(skipped))
            if skipped and candidate is not None:
                logger.warning(
                    "checkpoint of %s; going back to step %d, %d steps lost",
                    skipped[-1],
                    candidate.facts["step"],
                    newest_step - candidate.facts["step"],
                )
        found = group.broadcast(found)
        if "error" in found:
            raise CheckpointError(problem=found["error"])
        if found.get("none"):
            break
        reason = found.get("corrupt")
        if reason is None:
            restored, reason = _read(store, group, found["raw"], wanted, read)
            if restored is not None:
                lost = max(0, newest_step - restored.manifest.progress.step)
                return dataclasses.replace(restored, skipped=tuple(skipped), steps_lost=lost)
        skipped.append(f"step {found['step']}: {reason}")
    if skipped:
        raise CheckpointError(
            problem="No checkpoint of this run verifies. " + "; ".join(skipped),
            way_out="Restore the objects from a copy, or start under another --name.",
        )
    return None


def _find(
    store: ObjectStore, commit: Entry | None, *, is_next: bool
) -> tuple[Entry | None, dict[str, Any]]:
    """Read the manifest of ``commit``, or of the one before it when ``is_next``. Rank 0.

    Returns:
        The commit that was read, and what came of it, for all ranks to hear.
    """
    try:
        if is_next and commit is not None:
            commit = _older(store, commit)
    except RaydistError as error:
        return None, {"error": str(error)}
    if commit is None:
        return None, {"none": True}
    step = commit.facts["step"]
    try:
        return commit, {"step": step, "raw": read_commit(store, commit)[1]}
    except CheckpointCorruptError as error:
        return commit, {"step": step, "corrupt": str(error)}
    except RaydistError as error:
        return commit, {"step": step, "error": str(error)}


def _older(store: ObjectStore, commit: Entry) -> Entry | None:
    journal = Journal(store)
    commits = journal.commits(journal.tail())
    return next((other for other in commits if other.number < commit.number), None)


def _read(
    store: ObjectStore,
    group: Group,
    raw: bytes,
    wanted: Callable[[Manifest], list[WantedRange]],
    read: ReadSpans,
) -> tuple[Restored | None, str]:
    manifest = decode(raw, where="the committed manifest")
    status: dict[str, str] = {}
    restored: Restored | None = None
    try:
        ranges = wanted(manifest)
        spans = plan_reads(manifest, ranges)
        buffers = {
            r.spec.key: memoryview(bytearray(r.length * DTYPE_BYTES[r.spec.dtype])) for r in ranges
        }
        count = read(store, manifest, spans, buffers)
        restored = Restored(manifest=manifest, buffers=buffers, bytes_read=count)
    except CheckpointCorruptError as error:
        status = {"corrupt": str(error)}
    except (RaydistError, MemoryError) as error:
        status = {"error": str(error) or repr(error)}
    statuses = group.broadcast(group.gather(status))
    errors = [f"rank {r}: {s['error']}" for r, s in enumerate(statuses) if "error" in s]
    if errors:
        raise CheckpointError(problem=errors[0])
    corrupt = [s["corrupt"] for s in statuses if "corrupt" in s]
    return (None, corrupt[0]) if corrupt else (restored, "")
