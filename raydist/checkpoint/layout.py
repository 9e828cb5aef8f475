# SPDX-License-Identifier: Apache-2.0
"""Key names of a run on storage, format 1. Pure strings; the store is rooted at the run."""

from __future__ import annotations

RUN_KEY = "run.json"
SAVE_REQUEST_KEY = "control/save.json"
JOURNAL_HINT_KEY = "journal/hint"
CHECKPOINTS_PREFIX = "checkpoints/"


def journal_key(number: int) -> str:
    """Key of journal entry ``number``, counted from 1."""
    return f"journal/{number:08d}.json"


def lease_key(attempt: int) -> str:
    """Key of the object by which an attempt shows that it is alive."""
    return f"journal/alive-{attempt:04d}.json"


def attempt_prefix(step: int, attempt: int) -> str:
    """Folder of what one attempt saved at ``step``."""
    return f"{CHECKPOINTS_PREFIX}step-{step:012d}/attempt-{attempt:04d}/"


def part_key(step: int, attempt: int, rank: int, world_size: int) -> str:
    """Key of one rank's data object."""
    return f"{attempt_prefix(step, attempt)}rank-{rank:05d}-of-{world_size:05d}.safetensors"


def manifest_key(step: int, attempt: int) -> str:
    """Key of the manifest."""
    return f"{attempt_prefix(step, attempt)}manifest.json"


def outcome_key(attempt: int) -> str:
    """Key of what a finished attempt says of itself."""
    return f"report/attempt-{attempt:04d}.json"
