# SPDX-License-Identifier: Apache-2.0
"""Whether the writer of a run lives: who it is, the lease it renews, and how others look at it."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from raydist.checkpoint import layout
from raydist.checkpoint.journal import Entry
from raydist.clock import Clock
from raydist.errors import ObjectMissingError, RunAliveError, StorageError
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


class Lease:
    """The object by which an attempt shows that it lives."""

    def __init__(self, store: ObjectStore, attempt: int, holder: str) -> None:
        self._store = store
        self._key = layout.lease_key(attempt)
        self._holder = holder
        self._beats = 0

    def beat(self) -> None:
        """Renew it. A beat that fails only lets another driver take over; the fence holds."""
        self._beats += 1
        raw = json.dumps({"beats": self._beats, "holder": self._holder}).encode()
        try:
            self._store.put(self._key, raw)
        except StorageError:
            return


class Renewal(Protocol):
    """What renews a lease until it is told to stop."""

    def stop(self) -> None:
        """Renew no more; does not wait."""
        ...


Renew = Callable[[Lease], Renewal]


class RenewalThread:
    """Beats every LEASE_RENEW_S in a thread of this process."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name="raydist-lease", daemon=True)
        self.thread.start()

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Renew no more; does not wait."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(LEASE_RENEW_S):
            self._lease.beat()


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
