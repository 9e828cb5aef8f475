# SPDX-License-Identifier: Apache-2.0
"""One attempt's hold on a run: opened in the journal, kept alive by a lease, fenced by both."""

from __future__ import annotations

import json
import os
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raydist.checkpoint import layout
from raydist.checkpoint.journal import Entry, EntryKind, Journal
from raydist.clock import Clock
from raydist.errors import (
    FencedError,
    ObjectExistsError,
    ObjectMissingError,
    RunAliveError,
    StorageError,
)
from raydist.storage import ObjectStore

LEASE_RENEW_S = 3.0
LEASE_SILENCE_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process, as far as another can tell whether it still lives."""

    host: str
    pid: int
    started: str

    @classmethod
    def this_process(cls) -> Holder:
        """Return the identity of the running process."""
        return cls(host=_host_identity(), pid=os.getpid(), started=_start_time(os.getpid()))

    @classmethod
    def parse(cls, text: str) -> Holder:
        """Read ``str(holder)`` back."""
        host, pid, started = text.rsplit(":", 2)
        return cls(host=host, pid=int(pid), started=started)

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}:{self.started}"

    def is_dead_here(self) -> bool:
        """Whether this is a process of this host that is gone; False when that can't be told."""
        return self.host == _host_identity() and _start_time(self.pid) != self.started


def _host_identity() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    if not boot.exists() or not namespace.exists():
        return f"{socket.gethostname()}/unknown-{os.getpid()}"
    return f"{socket.gethostname()}/{boot.read_text().strip()[:8]}-{os.readlink(namespace)[5:-1]}"


def _start_time(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone"
    fields = stat.rpartition(")")[2].split()
    return "gone" if fields[0] in "ZX" else fields[19]


class Attempt:
    """The right to write a run's journal, from ``open_attempt`` to ``close``."""

    def __init__(
        self, *, run: str, store: ObjectStore, journal: Journal, opened: Entry, clock: Clock
    ) -> None:
        self.number = opened.attempt
        self.tail = opened
        self._run = run
        self._store = store
        self._journal = journal
        self._clock = clock
        self._beats = 0
        self._stopping = threading.Event()
        self._renewer = threading.Thread(target=self._renew, name="raydist-lease", daemon=True)
        self._beat()
        self._renewer.start()

    def commit(self, *, step: int, manifest_key: str, manifest_bytes: int, crc32c: int) -> Entry:
        """Append the entry that makes a checkpoint exist.

        Raises:
            FencedError: Another attempt holds the run now.
        """
        facts = {
            "step": step,
            "manifest": manifest_key,
            "manifest_bytes": manifest_bytes,
            "manifest_crc32c": crc32c,
        }
        return self._append("committed", facts)

    def abandon(self, *, step: int, why: str, ranks: list[int]) -> Entry:
        """Record that a save came to nothing.

        Raises:
            FencedError: Another attempt holds the run now.
        """
        return self._append("abandoned", {"step": step, "why": why, "ranks": ranks})

    def close(self, why: str) -> None:
        """Record the end of this attempt and stop its lease.

        Raises:
            FencedError: Another attempt holds the run now.
        """
        self._stopping.set()
        self._append("closed", {"why": why})

    def release(self) -> None:
        """Stop the lease without a word in the journal: for an attempt that ends by an error."""
        self._stopping.set()

    def _append(self, kind: EntryKind, facts: dict[str, Any]) -> Entry:
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
                facts=facts,
            )
            try:
                self._journal.append(entry)
            except ObjectExistsError:
                there = self._journal.read(number)
                if there is None or there.attempt != self.number:
                    self._stopping.set()
                    raise self._fenced(there) from None
                # An earlier append of ours whose reply was lost: it stands, go on from it.
                self.tail = there
                if (there.kind, there.facts) != (kind, facts):
                    continue
            else:
                self.tail = entry
            return self.tail

    def _fenced(self, newer: Entry | None) -> FencedError:
        return FencedError(
            run=self._run,
            attempt=self.number,
            holder=newer.holder if newer else "unknown",
            holder_attempt=newer.attempt if newer else -1,
        )

    def _beat(self) -> None:
        self._beats += 1
        raw = json.dumps({"beats": self._beats, "holder": self.tail.holder}).encode()
        self._store.put(layout.lease_key(self.number), raw)

    def _renew(self) -> None:
        while not self._stopping.wait(LEASE_RENEW_S):
            try:
                self._beat()
            except StorageError:
                continue  # Missing beats only let another driver take over; the fence holds.


def open_attempt(
    *,
    run: str,
    store: ObjectStore,
    driver: str,
    clock: Clock,
    seen_attempt: int | None = None,
    takeover: bool = False,
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
            holder=str(Holder.this_process()),
            unix_s=clock.now_unix_s(),
            last_commit=tail.last_commit if tail else None,
        )
        try:
            journal.append(opened)
        except ObjectExistsError:
            continue
        return Attempt(run=run, store=store, journal=journal, opened=opened, clock=clock)


def _newest_attempt_of_objects(store: ObjectStore) -> int:
    """Return the newest attempt that left checkpoint objects, 0 for none.

    Looked at where there is no journal: objects whose journal was lost are never overwritten.
    """
    numbers = [
        int(part.removeprefix("attempt-"))
        for key, _ in store.list(layout.CHECKPOINTS_PREFIX)
        for part in key.split("/")
        if part.startswith("attempt-") and part.removeprefix("attempt-").isdigit()
    ]
    return max(numbers, default=0)


def refuse_if_alive(*, run: str, store: ObjectStore, tail: Entry, clock: Clock) -> None:
    """Stop here when the attempt that wrote ``tail`` is training.

    Looks at the process itself on the same host, elsewhere at whether its lease beats within
    LEASE_SILENCE_S.

    Raises:
        RunAliveError: It is alive.
    """
    if tail.kind == "closed" or Holder.parse(tail.holder).is_dead_here():
        return
    first = _beats(store, tail.attempt)
    deadline = clock.monotonic_s() + LEASE_SILENCE_S
    while clock.monotonic_s() < deadline:
        if _beats(store, tail.attempt) != first:
            raise RunAliveError(
                problem=f"Run {run} is being trained: attempt {tail.attempt}, held by "
                f"{tail.holder}, is alive.",
                way_out="Wait for it, choose another --name, or take it over with --takeover.",
            )
        clock.sleep(0.5)


def _beats(store: ObjectStore, attempt: int) -> int:
    try:
        return int(json.loads(store.get(layout.lease_key(attempt)))["beats"])
    except (ObjectMissingError, ValueError, KeyError, TypeError):
        return 0
