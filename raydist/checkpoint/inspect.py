# SPDX-License-Identifier: Apache-2.0
"""Looking at a run's checkpoints: which there are, and whether every byte is as committed."""

from __future__ import annotations

from dataclasses import dataclass

from raydist.checkpoint import layout
from raydist.checkpoint.journal import Journal
from raydist.checkpoint.manifest import Manifest, decode
from raydist.checkpoint.reads import verify_object
from raydist.checkpoint.restore import read_commit
from raydist.errors import CheckpointCorruptError, CheckpointError, ObjectMissingError
from raydist.storage import ObjectStore


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """One committed checkpoint.

    Fields:
        problem: Why it is not valid as far as it was checked; empty when it is.
    """

    step: int
    attempt: int
    manifest: str
    unix_s: float
    world_size: int = 0
    strategy: str = ""
    bytes: int = 0
    problem: str = ""


def list_checkpoints(store: ObjectStore) -> list[CheckpointInfo]:
    """Return the committed checkpoints of the run at ``store``, newest first.

    Reads the journal and each manifest, no data object. A step that was committed again by a
    later attempt appears once for each.
    """
    journal = Journal(store)
    commit = journal.newest_commit(journal.tail())
    found = []
    while commit is not None:
        facts = commit.facts
        info = {
            "step": facts["step"],
            "attempt": commit.attempt,
            "manifest": facts["manifest"],
            "unix_s": commit.unix_s,
        }
        try:
            manifest, _ = read_commit(store, commit)
        except CheckpointError as error:
            found.append(CheckpointInfo(**info, problem=str(error)))
        else:
            found.append(
                CheckpointInfo(
                    **info,
                    world_size=manifest.world_size,
                    strategy=manifest.strategy,
                    bytes=manifest.total_bytes,
                )
            )
        commit = journal.older_commit(commit)
    return found


def verify_checkpoint(store: ObjectStore, manifest_key: str) -> tuple[Manifest, list[str]]:
    """Read every byte of a checkpoint on its manifest alone, and list what is wrong.

    Works on a copied folder too: the manifest carries the proof.

    Raises:
        CheckpointCorruptError: The manifest itself is missing.
        CheckpointError: It cannot be read.
    """
    try:
        raw = store.get(manifest_key)
    except ObjectMissingError as error:
        raise CheckpointCorruptError(key=manifest_key, reason="the manifest is missing") from error
    manifest = decode(raw, where=manifest_key)
    problems = []
    for info in manifest.objects:
        try:
            verify_object(store, info)
        except CheckpointCorruptError as error:
            problems.append(str(error))
    return manifest, problems


def has_uncommitted_objects(store: ObjectStore) -> bool:
    """Whether checkpoint objects lie there at all."""
    return next(store.list(layout.CHECKPOINTS_PREFIX), None) is not None
