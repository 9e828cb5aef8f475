# SPDX-License-Identifier: Apache-2.0
"""Ending checkpoints and collecting what belongs to none, as the holder of a run.

The `pruned` entry comes first, the deletions after it. Deleting first would leave, after a crash
between the two, a commit in the journal whose objects are gone: a reader could not tell that
from damage. With the entry first, a reader that meets a missing object finds in the journal that
the checkpoint was ended on purpose; a crash leaves objects that no checkpoint names, and the
next sweep deletes them like any other garbage. The entry is also the fence: a writer that has
been replaced cannot append it, so it deletes nothing that its successor counts on. Within a
checkpoint the manifest goes first, so that no reader of manifests alone sees one whose parts
are gone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raydist.checkpoint import layout
from raydist.checkpoint.attempt import Attempt
from raydist.checkpoint.journal import Entry, Journal
from raydist.checkpoint.restore import read_commit
from raydist.checkpoint.retention import (
    Decision,
    Frontier,
    RetentionPolicy,
    plan_garbage,
    plan_retention,
    plan_stale_uploads,
)
from raydist.errors import CheckpointError, RaydistError
from raydist.storage import ObjectStore
from raydist.storage.stale_uploads import StaleUploads

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneOutcome:
    """What a prune did.

    Fields:
        steps: Of the checkpoints that were ended.
        num_deleted: Objects, and leftovers of unfinished writes, that are gone.
        bytes_deleted: Of the objects.
        problem: Why it did not get to its end; what is left is for the next one.
    """

    steps: tuple[int, ...] = ()
    num_deleted: int = 0
    bytes_deleted: int = 0
    problem: str = ""


class Pruner:
    """Retention of one run, by the attempt that holds it. Rank 0 only; from one thread at a time.

    Args:
        store: Rooted at the run.
        attempt: Holds the run.
        policy: What stays.
    """

    def __init__(
        self,
        *,
        store: ObjectStore,
        attempt: Attempt,
        policy: RetentionPolicy,
    ) -> None:
        self._store = store
        self._attempt = attempt
        self._policy = policy
        self._journal = Journal(store)
        self._live: list[Entry] | None = None
        self._is_swept = False
        self._first_attempt: int | None = None

    def after_commit(self) -> PruneOutcome:
        """Apply the policy after a commit; never fatal, and what failed is tried again.

        The first call of an attempt, and the first after one that failed, also lists the run's
        objects and collects the garbage of whoever came before. Later ones list the folders that
        they empty. At most: a GET of the newest manifest, a HEAD for each of its objects, and for
        each checkpoint that ends a LIST and a DELETE an object; one journal entry in all.
        """
        steps: list[int] = []
        deleted: list[tuple[str, int]] = []
        problem = ""
        try:
            ended = [d.commit for d in self.decide() if not d.keep]
            if ended:
                self._end(ended)
                steps = [commit.facts["step"] for commit in ended]
            if not self._is_swept:
                self._sweep(deleted)
                self._is_swept = True
            for commit in ended:
                folder = commit.facts["manifest"].rpartition("/")[0] + "/"
                self._delete(self._store.list(folder), deleted)
        except RaydistError as error:
            self._live = None
            self._is_swept = False
            problem = str(error) or repr(error)
            logger.warning("pruning of attempt %d: %s", self._attempt.number, problem)
        return _outcome(steps, deleted, problem)

    def decide(self) -> list[Decision]:
        """Return what becomes of each checkpoint, newest first; changes nothing.

        Raises:
            CheckpointError: The journal is damaged.
            StorageError: The store failed.
        """
        return decide_retention(self._store, self._live_commits(), self._policy)

    def finish(self) -> PruneOutcome:
        """Collect garbage once more, at the end of the attempt; never fatal."""
        deleted: list[tuple[str, int]] = []
        problem = ""
        try:
            self._sweep(deleted)
        except RaydistError as error:
            problem = str(error) or repr(error)
            logger.warning("garbage of attempt %d stays: %s", self._attempt.number, problem)
        return _outcome([], deleted, problem)

    def _live_commits(self) -> list[Entry]:
        """Every commit that exists, newest first; read once, since only this attempt adds any."""
        if self._live is None:
            self._live = list(self._journal.commits(self._attempt.tail))
            return self._live
        newest = self._live[0].number if self._live else 0
        news = [commit for commit in self._attempt.commits if commit.number > newest]
        self._live = news[::-1] + self._live
        return self._live

    def _end(self, ended: list[Entry]) -> None:
        numbers = {commit.number for commit in ended}
        kept = [commit for commit in self._live_commits() if commit.number not in numbers]
        self._attempt.prune(ended, kept=kept)
        self._live = kept

    def _sweep(self, deleted: list[tuple[str, int]]) -> None:
        frontier = self._frontier()
        live = [commit.facts["manifest"] for commit in self._live_commits()]
        found = dict(self._store.list(layout.CHECKPOINTS_PREFIX))
        garbage = plan_garbage(found, live=live, frontier=frontier)
        self._delete(((key, found[key]) for key in garbage), deleted)
        if isinstance(self._store, StaleUploads):
            left = self._store.stale_uploads("", older_than_s=0.0)
            uploads = plan_stale_uploads(left, frontier=frontier)
            for upload in uploads:
                self._store.abort_upload(upload)
                deleted.append((upload.key + upload.upload_id, 0))

    def _frontier(self) -> Frontier:
        if self._first_attempt is None:
            first = self._journal.read(1)
            if first is None:
                raise CheckpointError(
                    problem=f"Journal entry {layout.journal_key(1)} is missing, so it is unknown "
                    "which attempts are this journal's; no garbage is collected."
                )
            self._first_attempt = first.attempt
        before = layout.Folder(attempt=self._attempt.number, step=0, save=0)
        if self._attempt.commits:
            newest = layout.parse_folder(self._attempt.commits[-1].facts["manifest"])
            before = newest or before
        return Frontier(first_attempt=self._first_attempt, before=before)

    def _delete(self, objects: Iterable[tuple[str, int]], deleted: list[tuple[str, int]]) -> None:
        for key, size in sorted(objects, key=lambda item: not item[0].endswith("/manifest.json")):
            self._store.delete(key)
            deleted.append((key, size))


def decide_retention(
    store: ObjectStore, live: Sequence[Entry], policy: RetentionPolicy
) -> list[Decision]:
    """Return what becomes of each of ``live``, newest first; changes nothing.

    Raises:
        StorageError: The store failed.
    """
    plan = plan_retention(live, (), policy, newest_valid=live[0].number if live else None)
    if all(decision.keep for decision in plan):
        return plan  # Nothing ends, so nothing has to be read.
    readable = next((commit.number for commit in live if is_readable(store, commit)), None)
    return plan_retention(live, (), policy, newest_valid=readable)


def _outcome(steps: list[int], deleted: list[tuple[str, int]], problem: str) -> PruneOutcome:
    return PruneOutcome(
        steps=tuple(steps),
        num_deleted=len(deleted),
        bytes_deleted=sum(size for _, size in deleted),
        problem=problem,
    )


def is_readable(store: ObjectStore, commit: Entry) -> bool:
    """Whether a checkpoint's manifest is as committed and its objects are there, whole in size.

    Raises:
        StorageError: The store failed.
    """
    try:
        manifest, _ = read_commit(store, commit)
    except CheckpointError:
        return False
    return all(store.size(info.key) == info.bytes for info in manifest.objects)
