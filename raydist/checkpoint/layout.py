# SPDX-License-Identifier: Apache-2.0
"""Key names of a run on storage, format 1. Pure strings; the store is rooted at the run."""

from __future__ import annotations

import re
from dataclasses import dataclass

RUN_KEY = "run.json"
JOURNAL_PREFIX = "journal/"
SAVE_REQUEST_KEY = "control/save.json"
JOURNAL_HINT_KEY = "journal/hint"
CHECKPOINTS_PREFIX = "checkpoints/"


def journal_key(number: int) -> str:
    """Key of journal entry ``number``, counted from 1."""
    return f"journal/{number:08d}.json"


def parse_journal_key(key: str) -> int | None:
    """Return the number of a journal entry's key; None for another key."""
    found = re.fullmatch(JOURNAL_PREFIX + r"(\d{8})\.json", key)
    return int(found[1]) if found else None


def lease_key(attempt: int) -> str:
    """Key of the object by which an attempt shows that it is alive."""
    return f"journal/alive-{attempt:04d}.json"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Folder:
    """Where one save of one attempt lies.

    Fields:
        attempt: The attempt that saved.
        step: Step of the state.
        save: Which save of that step by that attempt it is, from 1. Each has a folder of its
            own: a request of an earlier one may take effect after it was given up.
    """

    attempt: int
    step: int
    save: int = 1

    @property
    def prefix(self) -> str:
        """What the keys of its objects start with."""
        again = "" if self.save == 1 else f".{self.save}"
        return f"{CHECKPOINTS_PREFIX}step-{self.step:012d}/attempt-{self.attempt:04d}{again}/"


_FOLDER = re.compile(CHECKPOINTS_PREFIX + r"step-(\d{12,})/attempt-(\d{4,})(?:\.(\d+))?/")


def parse_folder(key: str) -> Folder | None:
    """Return the folder of a checkpoint object's key; None for a key of another form."""
    found = _FOLDER.match(key)
    if found is None:
        return None
    step, attempt, save = found.groups()
    return Folder(attempt=int(attempt), step=int(step), save=int(save or 1))


def part_key(step: int, attempt: int, rank: int, world_size: int, save: int = 1) -> str:
    """Key of one rank's data object."""
    prefix = Folder(attempt=attempt, step=step, save=save).prefix
    return f"{prefix}rank-{rank:05d}-of-{world_size:05d}.safetensors"


def manifest_key(step: int, attempt: int, save: int = 1) -> str:
    """Key of the manifest."""
    return f"{Folder(attempt=attempt, step=step, save=save).prefix}manifest.json"


def outcome_key(attempt: int) -> str:
    """Key of what a finished attempt says of itself."""
    return f"report/attempt-{attempt:04d}.json"
