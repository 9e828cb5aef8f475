# SPDX-License-Identifier: Apache-2.0
"""One attempt's hold on a run: opened in the journal, kept alive by a lease, fenced by both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raydist.checkpoint import layout
from raydist.checkpoint.journal import Entry, EntryKind, Journal
from raydist.checkpoint.lease import Holder, Lease, Renew, RenewalThread, refuse_if_alive
from raydist.clock import Clock
from raydist.errors import CommitUnknownError, FencedError, ObjectExistsError, StorageError
from raydist.storage import ObjectStore


class Attempt:
    """The right to write a run's journal, from ``open_attempt`` to ``close``.

    Attributes:
        opened: The entry that gave the right.
        tail: The newest entry, as far as known.
        commits: Its own, oldest first, also those found late.
    """

    def __init__(
        self,
        *,
        run: str,
        store: ObjectStore,
        journal: Journal,
        opened: Entry,
        clock: Clock,
        renew: Renew = RenewalThread,
    ) -> None:
        self.number = opened.attempt
        self.opened = opened
        self.tail = opened
        self.commits: list[Entry] = []
        self._run = run
        self._journal = journal
        self._clock = clock
        lease = Lease(store, opened.attempt, opened.holder)
        lease.beat()
        self.renewal = renew(lease)

    def commit(
        self,
        *,
        step: int,
        manifest_key: str,
        manifest_bytes: int,
        crc32c: int,
        loss: float | None = None,
    ) -> Entry:
        """Append the entry that makes a checkpoint exist.

        Args:
            step: Of the checkpoint.
            manifest_key: Where its manifest lies.
            manifest_bytes: Size of the manifest.
            crc32c: Of the manifest.
            loss: At that step; what retention calls best.

        Raises:
            FencedError: Another attempt holds the run now; this commit will never be.
            CommitUnknownError: The store failed and the entry could not be seen, yet it may
                still arrive. It is either there or impossible once a later entry of this
                attempt, or another attempt's, stands.
        """
        facts = {
            "step": step,
            "manifest": manifest_key,
            "manifest_bytes": manifest_bytes,
            "manifest_crc32c": crc32c,
        }
        if loss is not None:
            facts["loss"] = loss
        try:
            return self._append("committed", facts)
        except StorageError as error:
            raise CommitUnknownError(problem=str(error), step=step) from error

    def abandon(self, *, step: int, why: str, ranks: list[int]) -> Entry:
        """Record that a save came to nothing.

        Raises:
            FencedError: Another attempt holds the run now.
        """
        return self._append("abandoned", {"step": step, "why": why, "ranks": ranks})

    def prune(self, commits: Sequence[Entry], *, kept: Sequence[Entry]) -> Entry:
        """Record that ``commits`` exist no more; their objects may be deleted afterwards.

        Args:
            commits: Entries that end.
            kept: All that stay, so that a reader need not walk over those that ended.

        Raises:
            FencedError: Another attempt holds the run now; nothing may be deleted.
        """
        facts = {
            "steps": [commit.facts["step"] for commit in commits],
            "commits": [commit.number for commit in commits],
            "kept": [commit.number for commit in kept],
        }
        return self._append("pruned", facts)

    def close(self, why: str) -> None:
        """Record the end of this attempt and stop its lease.

        Raises:
            FencedError: Another attempt holds the run now.
        """
        self.renewal.stop()
        self._append("closed", {"why": why})

    def release(self) -> None:
        """Stop the lease without a word in the journal: for an attempt that ends by an error."""
        self.renewal.stop()

    def _append(self, kind: EntryKind, facts: dict[str, Any]) -> Entry:
        """Append one entry behind whatever of ours is there by now.

        After a StorageError the entry may still arrive, at its own number and no other. The next
        append goes to that same number: it takes it, and the late one never will; or it finds
        the late one there, and goes on from it. So nothing is guessed.
        """
        while True:
            number = self.tail.number + 1
            entry = Entry(
                number=number,
                kind=kind,
                attempt=self.number,
                driver=self.tail.driver,
                holder=self.tail.holder,
                unix_s=self._clock.now_unix_s(),
                last_commit=number if kind == "committed" else self.tail.last_commit,
                last_pruned=number if kind == "pruned" else self.tail.last_pruned,
                facts=facts,
            )
            try:
                self._journal.append(entry)
            except ObjectExistsError:
                there = self._journal.read(number)
                if there is None or there.attempt != self.number:
                    self.renewal.stop()
                    raise self._fenced(there) from None
                # An earlier append of ours whose reply was lost: it stands, go on from it.
                self._go_on_from(there)
                if (there.kind, there.facts) != (kind, facts):
                    continue
            else:
                self._go_on_from(entry)
            return self.tail

    def _go_on_from(self, entry: Entry) -> None:
        self.tail = entry
        if entry.kind == "committed":
            self.commits.append(entry)

    def _fenced(self, newer: Entry | None) -> FencedError:
        return FencedError(
            run=self._run,
            attempt=self.number,
            holder=newer.holder if newer else "unknown",
            holder_attempt=newer.attempt if newer else -1,
        )


def open_attempt(
    *,
    run: str,
    store: ObjectStore,
    driver: str,
    clock: Clock,
    seen_attempt: int | None = None,
    takeover: bool = False,
    holder: Holder | None = None,
    renew: Renew = RenewalThread,
) -> Attempt:
    """Append the next attempt to the journal and hold it.

    Called by rank 0 of each worker group. An attempt of the same driver is replaced at once.

    Args:
        run: Name, for messages.
        store: Rooted at the run.
        driver: Identity of the submission.
        clock: For the entry and the waiting.
        seen_attempt: The newest attempt when the driver was allowed to start; one of another
            driver since then has replaced this driver for good. None allows any.
        takeover: Whether the seen attempt may be alive.
        holder: The process that holds it; None is this one.
        renew: Starts what keeps the lease.

    Raises:
        FencedError: Another driver came after ``seen_attempt``.
        RunAliveError: Another driver's attempt is alive and ``takeover`` is False.
    """
    journal = Journal(store)
    while True:
        tail = journal.tail()
        if tail is not None and tail.driver != driver:
            if seen_attempt is not None and tail.attempt > seen_attempt:
                raise FencedError(
                    run=run,
                    attempt=seen_attempt,
                    holder=tail.holder,
                    holder_attempt=tail.attempt,
                )
            if not takeover:
                refuse_if_alive(run=run, store=store, tail=tail, clock=clock)
        number = tail.number + 1 if tail else 1
        opened = Entry(
            number=number,
            kind="opened",
            attempt=(tail.attempt if tail else _newest_attempt_of_objects(store)) + 1,
            driver=driver,
            holder=str(holder or Holder.this_process()),
            unix_s=clock.now_unix_s(),
            last_commit=tail.last_commit if tail else None,
            last_pruned=tail.last_pruned if tail else None,
        )
        try:
            journal.append(opened)
        except ObjectExistsError:
            continue
        return Attempt(
            run=run, store=store, journal=journal, opened=opened, clock=clock, renew=renew
        )


def _newest_attempt_of_objects(store: ObjectStore) -> int:
    """Return the newest attempt that left checkpoint objects, 0 for none.

    Looked at where there is no journal: objects whose journal was lost are never overwritten.
    """
    folders = (layout.parse_folder(key) for key, _ in store.list(layout.CHECKPOINTS_PREFIX))
    return max((folder.attempt for folder in folders if folder), default=0)
