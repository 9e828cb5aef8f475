# SPDX-License-Identifier: Apache-2.0
"""Looking at a run's checkpoints: which there are, and whether every byte is as committed.

For people, so it goes on where a start refuses: a damaged journal entry is reported, and what
it may have said is put together from the entries around it and from the manifests themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from raydist.checkpoint import layout
from raydist.checkpoint.journal import Entry, Journal
from raydist.checkpoint.manifest import Manifest, decode
from raydist.checkpoint.reads import verify_object
from raydist.checkpoint.restore import read_commit
from raydist.errors import CheckpointCorruptError, CheckpointError, ObjectMissingError
from raydist.storage import ObjectStore


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """One checkpoint.

    Fields:
        known_by: `journal`, or `manifest` where the journal is damaged and no readable entry
            names it: it may have been committed by the damaged one.
        problem: Why it is not valid as far as it was checked; empty when it is.
    """

    step: int
    attempt: int
    manifest: str
    unix_s: float
    known_by: Literal["journal", "manifest"] = "journal"
    world_size: int = 0
    strategy: str = ""
    bytes: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What a run's location holds.

    Fields:
        checkpoints: Newest first. A step that was committed again by a later attempt appears
            once for each.
        damage: What is wrong with the journal, a sentence an entry.
    """

    checkpoints: tuple[CheckpointInfo, ...]
    damage: tuple[str, ...] = ()


def survey(store: ObjectStore) -> Survey:
    """Return the checkpoints of the run at ``store``.

    Reads the journal and each manifest, no data object; lists only where the journal is damaged.

    Raises:
        StorageError: The store failed.
    """
    journal = Journal(store)
    try:
        commits = list(journal.commits(journal.tail()))
    except CheckpointError as error:
        return _survey_damaged(store, error)
    return Survey(checkpoints=tuple(_info(store, commit) for commit in commits))


def list_checkpoints(store: ObjectStore) -> list[CheckpointInfo]:
    """Return ``survey(store).checkpoints``, for callers whom the journal's state is no matter.

    Raises:
        StorageError: The store failed.
    """
    return list(survey(store).checkpoints)


def _info(store: ObjectStore, commit: Entry) -> CheckpointInfo:
    info = {
        "step": commit.facts["step"],
        "attempt": commit.attempt,
        "manifest": commit.facts["manifest"],
        "unix_s": commit.unix_s,
    }
    try:
        manifest, _ = read_commit(store, commit)
    except CheckpointError as error:
        return CheckpointInfo(**info, problem=str(error))
    return CheckpointInfo(
        **info,
        world_size=manifest.world_size,
        strategy=manifest.strategy,
        bytes=manifest.total_bytes,
    )


def _survey_damaged(store: ObjectStore, error: CheckpointError) -> Survey:
    damage: list[str] = []
    commits: dict[int, Entry] = {}
    ended: set[int] = set()
    for number, entry in _entries(store, damage):
        if entry is not None and entry.kind == "committed":
            commits[number] = entry
        if entry is not None and entry.kind == "pruned":
            ended.update(entry.facts["commits"])
    named = {commit.facts["manifest"] for commit in commits.values()}
    found = [_info(store, commit) for n, commit in commits.items() if n not in ended]
    for key, _ in store.list(layout.CHECKPOINTS_PREFIX):
        if key.endswith("/manifest.json") and key not in named:
            found.append(_info_of_manifest(store, key))
    found.sort(key=lambda info: (info.attempt, info.step, info.manifest), reverse=True)
    return Survey(checkpoints=tuple(found), damage=tuple(damage) or (error.problem,))


def _entries(store: ObjectStore, damage: list[str]) -> Iterator[tuple[int, Entry | None]]:
    """Yield every journal entry that is there, None for one that cannot be read."""
    journal, due = Journal(store), 1
    for key, _ in store.list(layout.JOURNAL_PREFIX):
        number = layout.parse_journal_key(key)
        if number is None:
            continue
        if number != due:
            damage.append(f"Journal entries {due} to {number - 1} are missing.")
        due = number + 1
        try:
            yield number, journal.read(number)
        except CheckpointError as error:
            damage.append(error.problem)
            yield number, None


def _info_of_manifest(store: ObjectStore, key: str) -> CheckpointInfo:
    folder = layout.parse_folder(key) or layout.Folder(attempt=0, step=0)
    try:
        manifest = read_manifest(store, key)
    except CheckpointError as error:
        return CheckpointInfo(
            step=folder.step,
            attempt=folder.attempt,
            manifest=key,
            unix_s=0.0,
            known_by="manifest",
            problem=str(error),
        )
    return CheckpointInfo(
        step=manifest.progress.step,
        attempt=manifest.attempt,
        manifest=key,
        unix_s=manifest.created_unix_s,
        known_by="manifest",
        world_size=manifest.world_size,
        strategy=manifest.strategy,
        bytes=manifest.total_bytes,
    )


def read_manifest(store: ObjectStore, manifest_key: str) -> Manifest:
    """Return a manifest on its own proof, without the journal.

    Raises:
        CheckpointCorruptError: It is missing.
        CheckpointError: It cannot be read.
    """
    try:
        raw = store.get(manifest_key)
    except ObjectMissingError as error:
        raise CheckpointCorruptError(key=manifest_key, reason="the manifest is missing") from error
    return decode(raw, where=manifest_key)


def verify_checkpoint(store: ObjectStore, manifest_key: str) -> tuple[Manifest, list[str]]:
    """Read every byte of a checkpoint on its manifest alone, and list what is wrong.

    Works on a copied folder too: the manifest carries the proof.

    Raises:
        CheckpointCorruptError: The manifest itself is missing.
        CheckpointError: It cannot be read.
    """
    manifest = read_manifest(store, manifest_key)
    problems = []
    for info in manifest.objects:
        try:
            verify_object(store, info)
        except CheckpointCorruptError as error:
            problems.append(str(error))
    return manifest, problems


def was_pruned(store: ObjectStore, manifest_key: str) -> bool:
    """Whether the journal says by now that this checkpoint exists no more.

    To be asked when an object is found missing: the entry is there before the first deletion.

    Raises:
        CheckpointError: The journal is damaged.
        StorageError: The store failed.
    """
    journal = Journal(store)
    tail = journal.tail()
    if tail is None or tail.last_pruned is None:
        return False
    return all(commit.facts["manifest"] != manifest_key for commit in journal.commits(tail))


def has_uncommitted_objects(store: ObjectStore) -> bool:
    """Whether checkpoint objects lie there at all."""
    return next(store.list(layout.CHECKPOINTS_PREFIX), None) is not None
