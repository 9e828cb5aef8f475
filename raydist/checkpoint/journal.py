# SPDX-License-Identifier: Apache-2.0
"""The run's journal: append-only entries that decide what exists and who may write.

Entry n + 1 is created only if absent, so of two writers one loses, reads on and learns who
holds the run. Entries are consecutive: the tail is found by probing keys, never by listing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from raydist.checkpoint import layout
from raydist.checkpoint.sealed import seal, unseal
from raydist.errors import CheckpointError, ObjectExistsError, ObjectMissingError, StorageError
from raydist.storage import ObjectStore

EntryKind = Literal["opened", "committed", "abandoned", "pruned", "closed"]

_FACTS = {
    "committed": frozenset({"step", "manifest", "manifest_bytes", "manifest_crc32c"}),
    "pruned": frozenset({"commits", "kept"}),
}
_MAX_HINT = 10**8 - 1  # the keys have eight digits
_WAY_OUT = "Restore it from a copy of the run, or start under another name."


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One journal entry.

    Fields:
        number: Its place, from 1.
        attempt: The attempt that wrote it; attempts only grow.
        driver: Identity of the submission that the attempt belongs to.
        holder: Host and process of the writer, for people and for the liveness check.
        last_commit: Number of the newest `committed` entry up to and including this one.
        last_pruned: Likewise of the newest `pruned` entry.
        facts: What the kind adds: step, manifest key, size and checksum; or why.
    """

    number: int
    kind: EntryKind
    attempt: int
    driver: str
    holder: str
    unix_s: float
    last_commit: int | None
    last_pruned: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)


class Journal:
    """Entries of one run on a store rooted at the run."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def read(self, number: int) -> Entry | None:
        """Return entry ``number``, or None when it was never written.

        Raises:
            CheckpointError: It is there and cannot be read.
        """
        key = layout.journal_key(number)
        try:
            entry = Entry(**unseal(self._store.get(key)))
            _check(entry, number)
        except ObjectMissingError:
            return None
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(
                problem=f"Journal entry {key} cannot be read: {error!r}.", way_out=_WAY_OUT
            ) from error
        return entry

    def tail(self) -> Entry | None:
        """Return the newest entry, or None for a run without one.

        With a fresh hint: 3 requests. Without: a number logarithmic in the entries.
        """
        entry = self.read(self._hint())
        low, step = (entry.number, 1) if entry else (0, 1)
        high = low + step
        while (probe := self.read(high)) is not None:
            entry, low, step = probe, high, step * 2
            high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            probe = self.read(middle)
            if probe is None:
                high = middle
            else:
                entry, low = probe, middle
        return entry

    def newest_commit(self, tail: Entry | None) -> Entry | None:
        """Return the newest commit as seen from ``tail``, or None when there was none.

        The newest is never pruned.

        Raises:
            CheckpointError: There was one, and its entry is gone or not of a commit.
        """
        if tail is None or tail.last_commit is None:
            return None
        return self._named(tail.last_commit, "committed", by=tail)

    def commits(self, tail: Entry | None) -> Iterator[Entry]:
        """Yield the commits that exist as seen from ``tail``, newest first; pruned ones do not.

        One request a commit, and one for the newest `pruned` entry, which names those that it
        kept of all before it.

        Raises:
            CheckpointError: An entry is gone, cannot be read or is of another kind than named.
        """
        commit = self.newest_commit(tail)
        if tail is None or commit is None:
            return
        pruned: Entry | None = None
        if tail.last_pruned is not None:
            pruned = self._named(tail.last_pruned, "pruned", by=tail)
        horizon = pruned.number if pruned else 0
        while commit is not None and commit.number > horizon:
            yield commit
            commit = self.newest_commit(self._get(commit.number - 1)) if commit.number > 1 else None
        if pruned is not None:
            for number in sorted(pruned.facts["kept"], reverse=True):
                yield self._named(number, "committed", by=pruned)

    def append(self, entry: Entry) -> None:
        """Create ``entry`` at its number.

        Raises:
            ObjectExistsError: Somebody was faster.
            StorageError: The store failed, and the entry is not there or not seen. It may still
                arrive, at this number.
        """
        raw = seal({name: getattr(entry, name) for name in _FIELDS})
        try:
            self._store.put(layout.journal_key(entry.number), raw, if_absent=True)
        except ObjectExistsError:
            raise
        except StorageError:
            if self.read(entry.number) != entry:  # else only the reply was lost
                raise
        try:
            self._store.put(layout.JOURNAL_HINT_KEY, str(entry.number).encode())
        except StorageError:
            return  # The entry stands; a stale hint costs the next reader a few probes.

    def _named(self, number: int, kind: EntryKind, *, by: Entry) -> Entry:
        if number == by.number and by.kind == kind:
            return by
        entry = self._get(number)
        if entry.kind != kind:
            raise CheckpointError(
                problem=f"Journal entry {layout.journal_key(number)} is `{entry.kind}`, where "
                f"entry {by.number} names it as `{kind}`.",
                way_out=_WAY_OUT,
            )
        return entry

    def _get(self, number: int) -> Entry:
        entry = self.read(number)
        if entry is None:
            raise CheckpointError(
                problem=f"Journal entry {layout.journal_key(number)} is missing, but later ones "
                "are there.",
                way_out=_WAY_OUT,
            )
        return entry

    def _hint(self) -> int:
        try:
            hint = int(self._store.get(layout.JOURNAL_HINT_KEY))
        except (StorageError, ValueError):
            return 1  # Without one the search is longer, and fails if the store does.
        return hint if 1 <= hint <= _MAX_HINT else 1


_FIELDS = tuple(f.name for f in fields(Entry))


def _check(entry: Entry, number: int) -> None:
    if entry.number != number or entry.kind not in get_args(EntryKind):
        raise ValueError(f"it is number {entry.number}, of kind {entry.kind}")
    for name, kind in (("last_commit", "committed"), ("last_pruned", "pruned")):
        value = getattr(entry, name)
        if not isinstance(value, int | None) or (entry.kind == kind and value != number):
            raise ValueError(f"{name} is {value!r}")
    if not entry.facts.keys() >= _FACTS.get(entry.kind, frozenset()):
        raise ValueError(f"it is of kind {entry.kind} without the facts of one")
