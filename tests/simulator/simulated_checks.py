# SPDX-License-Identifier: Apache-2.0
"""What must hold in every schedule, looked at whenever an object changes.

I1 a visible checkpoint is complete and every byte matches; I2 committed steps never go back and
a replaced writer never commits; I3 a resume takes the newest valid checkpoint and says why it
passed over others; I5 no more than an interval of work is lost; I7 nothing is left over. (I6,
progress or a named error, is the scheduler's: see simulated_run.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulated_world import Bucket, World

from raydist.checkpoint import layout
from raydist.checkpoint.manifest import Manifest, decode
from raydist.checkpoint.objects import crc32c
from raydist.checkpoint.sealed import unseal

NUM_BYTES = 12


class InvariantError(Exception):
    """The protocol did what it must never do."""


def content(attempt: int, step: int, save: int) -> bytes:
    """The state that one save saves; no two are alike, so a mixture shows."""
    return hashlib.blake2b(f"{attempt}/{step}/{save}".encode(), digest_size=NUM_BYTES).digest()


@dataclass(kw_only=True)
class Checkpoint:
    """A commit in the journal."""

    number: int
    step: int
    attempt: int
    key: str
    manifest: Manifest | None
    keys: frozenset[str]
    state: bytes
    at_s: float
    damaged_s: float | None = None
    """When the simulation damaged it; the protocol is not to blame."""
    is_lost: bool = False
    """Whether the damage is one that a look at sizes shows."""


@dataclass(kw_only=True)
class Progress:
    """What an attempt's rank 0 has done and heard."""

    step: int = 0
    failed_saves: int = 0
    reported: int = 0
    """Newest step that it was told is committed."""


@dataclass(kw_only=True)
class Checker:
    """Follows the journal as it grows and every checkpoint that it makes visible."""

    world: World
    bucket: Bucket
    every: int
    entries: list[dict[str, Any]] = field(default_factory=list)
    visible: dict[int, Checkpoint] = field(default_factory=dict)
    owner: dict[str, int] = field(default_factory=dict)
    progress: dict[int, Progress] = field(default_factory=dict)
    states: dict[layout.Folder, bytes] = field(default_factory=dict)
    saved: dict[tuple[int, int], set[bytes]] = field(default_factory=dict)
    denied: set[tuple[int, int, int]] = field(default_factory=set)
    """(attempt, step, save) that its ranks were told is not committed, and never will be."""
    lose_at_commit: int = 0
    """The commit of which the storage loses an object as soon as it stands."""
    num_commits: int = 0
    opened_s: float = 0.0
    is_damaging: bool = False
    is_admissible: Callable[[dict[str, Any]], None] = lambda _: None

    def __post_init__(self) -> None:
        self.bucket.on_change = self.changed

    def changed(self, key: str, old: bytes | None, new: bytes | None) -> None:
        if key in self.owner:
            if old != new and not self.is_damaging:
                what = "deleted" if new is None else "overwritten"
                self.fail("I1", f"{key} of committed entry {self.owner[key]} was {what}")
        elif key.startswith("journal/0"):
            if old is not None and old != new:
                self.fail("I2", f"{key} was overwritten or deleted")
            elif old is None and new is not None:
                self.grown(key, unseal(new))

    def grown(self, key: str, entry: dict[str, Any]) -> None:
        number, kind = entry["number"], entry["kind"]
        before = self.entries[-1] if self.entries else None
        if number != len(self.entries) + 1 or key != layout.journal_key(number):
            self.fail("I2", f"entry {number} follows {len(self.entries)} at {key}")
        holder = before["attempt"] if before else 0
        if entry["attempt"] != holder + (kind == "opened"):
            self.fail(
                "I2", f"attempt {entry['attempt']} wrote `{kind}` while {holder} held the run"
            )
        if before and before["kind"] == "closed" and kind != "opened":
            self.fail("I2", f"`{kind}` after the end of attempt {holder}")
        expected = number if kind == "committed" else before and before["last_commit"]
        if entry["last_commit"] != expected:
            self.fail("I2", f"entry {number} says last_commit={entry['last_commit']}")
        self.entries.append(entry)
        {"committed": self.committed, "opened": self.opened, "pruned": self.pruned}.get(
            kind, lambda _: None
        )(entry)

    def committed(self, entry: dict[str, Any]) -> None:
        facts, number = entry["facts"], entry["number"]
        key, objects = facts["manifest"], self.bucket.objects
        folder = layout.parse_folder(key)
        if folder is None or (folder.attempt, folder.step) != (entry["attempt"], facts["step"]):
            self.fail("I1", f"entry {number} commits {key}")
            return
        if (folder.attempt, folder.step, folder.save) in self.denied:
            self.fail("I6", f"{key} is committed after its ranks were told that it is not")
        newest = max((c.step for c in self.visible.values() if c.damaged_s is None), default=0)
        if facts["step"] < newest and not any(c.damaged_s for c in self.visible.values()):
            self.fail("I2", f"step {facts['step']} is committed after step {newest}")
        raw = objects.get(key)
        if raw is None or crc32c(raw) != facts["manifest_crc32c"]:
            self.fail("I1", f"entry {number} commits {key}, which is not there as committed")
            return
        manifest = decode(raw, where=key)
        state = bytearray(NUM_BYTES)
        for part in manifest.objects:
            data = objects.get(part.key)
            if data is None or (len(data), crc32c(data)) != (part.bytes, part.crc32c):
                self.fail("I1", f"entry {number} commits step {facts['step']} without {part.key}")
                return
        for index, stored in manifest.ranges["master/w"]:
            data = objects[manifest.objects[index].key]
            raw = data[stored.byte_start : stored.byte_start + stored.length]
            state[stored.offset : stored.offset + stored.length] = raw
        if bytes(state) not in self.saved.get((folder.attempt, folder.step), ()):
            self.fail("I1", f"entry {number} commits a mixture of several saves")
        keys = frozenset([key, *(part.key for part in manifest.objects)])
        self.visible[number] = Checkpoint(
            number=number,
            step=facts["step"],
            attempt=entry["attempt"],
            key=key,
            manifest=manifest,
            keys=keys,
            state=bytes(state),
            at_s=self.world.now_s,
        )
        self.states[folder] = bytes(state)
        self.owner.update(dict.fromkeys(keys, number))
        self.num_commits += 1
        if self.num_commits == self.lose_at_commit:
            self.damage(self.visible[number], manifest.objects[0].key, lose=True)

    def opened(self, entry: dict[str, Any]) -> None:
        """A new attempt: what its predecessor had done is measured against what stands."""
        self.is_admissible(entry)
        self.opened_s = self.world.now_s
        before = self.progress.get(entry["attempt"] - 1)
        self.progress.setdefault(entry["attempt"], Progress())
        if before is None or any(c.damaged_s is not None for c in self.visible.values()):
            return
        at = max((c.step for c in self.visible.values()), default=0)
        if at < before.reported:
            self.fail("I5", f"step {before.reported} was reported committed; the newest is {at}")
        lost = before.step - at
        if lost > self.every * (1 + before.failed_saves) + 1:
            self.fail("I5", f"{lost} steps lost with {before.failed_saves} failed saves")

    def pruned(self, entry: dict[str, Any]) -> None:
        numbers = entry["facts"]["commits"]
        if any(number not in self.visible for number in numbers):
            self.fail("I2", f"entry {entry['number']} prunes {numbers}, not all of which exist")
            return
        # Damage done after the newest commit may have come after the pruner had looked.
        newest_at = max(c.at_s for c in self.visible.values())
        valid = [
            number
            for number, c in self.visible.items()
            if not c.is_lost or c.damaged_s is None or c.damaged_s > newest_at
        ]
        if max(self.visible) in numbers or (valid and max(valid) in numbers):
            self.fail("I1", f"entry {entry['number']} prunes the newest valid checkpoint")
        for number in numbers:
            for key in self.visible.pop(number).keys:
                del self.owner[key]
        if sorted(entry["facts"]["kept"]) != sorted(self.visible):
            self.fail("I3", f"entry {entry['number']} keeps other than what exists")

    def damage(self, checkpoint: Checkpoint, key: str, *, lose: bool) -> None:
        """Do what the protocol never may: lose an object or flip a byte of it."""
        self.world.note(f"the storage {'loses' if lose else 'alters'} {key}")
        if checkpoint.damaged_s is None or lose:
            checkpoint.damaged_s = self.world.now_s
        checkpoint.is_lost |= lose
        self.is_damaging = True
        if lose:
            self.bucket.delete(key)
        else:
            raw = bytearray(self.bucket.objects[key])
            raw[len(raw) // 2] ^= 1
            self.bucket.put(key, bytes(raw), if_absent=False)
        self.is_damaging = False

    def restored(
        self, *, attempt: int, folder: layout.Folder | None, skipped: tuple[str, ...], opened: int
    ) -> None:
        """Rank 0 of ``attempt``, opened by entry ``opened``, has restored ``folder`` or nothing."""
        if not self.is_current(attempt):
            return  # replaced meanwhile: its successor may have pruned under its hands
        if any((c.damaged_s or 0.0) > self.opened_s for c in self.visible.values()):
            return  # damaged under its hands
        live = sorted(
            (c for c in self.visible.values() if c.number < opened), key=lambda c: c.number
        )
        passed = []
        while live and live[-1].damaged_s is not None:
            passed.append(live.pop().step)
        due = layout.parse_folder(live[-1].key) if live else None
        if folder != due:
            self.fail("I3", f"attempt {attempt} resumed from {folder}, not {due}")
        if [int(text.split()[1].rstrip(":")) for text in skipped] != passed:
            self.fail("I3", f"attempt {attempt} passed over {passed} and said {skipped}")

    def is_current(self, attempt: int) -> bool:
        """Whether ``attempt`` is the newest one."""
        if attempt not in self.progress:
            self.fail("I2", f"attempt {attempt} works without an entry that opened it")
        return self.entries[-1]["attempt"] == attempt

    def nothing_left_over(self) -> None:
        """After the last garbage collection."""
        for key in self.bucket.objects:
            if key.startswith(layout.CHECKPOINTS_PREFIX) and key not in self.owner:
                self.fail("I7", f"{key} belongs to no checkpoint")

    def fail(self, invariant: str, text: str) -> None:
        raise InvariantError(f"{invariant}: {text}")
