# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints stay, and which objects belong to none. Pure; prune.py acts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from raydist.checkpoint import layout
from raydist.checkpoint.journal import Entry
from raydist.errors import ConfigError
from raydist.storage.stale_uploads import StaleUpload

STALE_UPLOAD_S = 3600.0
"""Silence after which an unfinished write outside a checkpoint's folder is a dead writer's: far
beyond any clock skew between nodes and storage, and nothing but a few bytes waits for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionPolicy:
    """Which checkpoints stay. Each rule keeps; what no rule keeps is pruned.

    Fields:
        keep_last: The newest so many; None keeps all, whatever the other rules say.
        keep_every_steps: Those of steps divisible by it, for ever; None for no such rule.
        keep_best: So many with the lowest loss, of those that recorded one.
    """

    keep_last: int | None = None
    keep_every_steps: int | None = None
    keep_best: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every_steps", "keep_best"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    problem=f"{name}={value} keeps nothing.",
                    way_out=f"Set {name} to at least 1, or leave it out.",
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What becomes of one commit, and why."""

    commit: Entry
    keep: bool
    reason: str


def plan_retention(
    commits: Sequence[Entry],
    pruned: Collection[int],
    policy: RetentionPolicy,
    *,
    newest_valid: int | None,
) -> list[Decision]:
    """Decide over all commits of a run.

    Pure. The newest commit and the newest valid one always stay, and so does everything between
    them; the rules count from the newest valid one backwards. A step that was committed again
    is the later commit's.

    Args:
        commits: Newest first.
        pruned: Numbers of those that exist no more.
        policy: The rules.
        newest_valid: Number of the newest commit that was found readable; None when none was,
            and then nothing is pruned.

    Returns:
        A decision for each commit that exists, newest first.
    """
    live = [commit for commit in commits if commit.number not in pruned]
    reasons: dict[int, str] = {}
    if newest_valid is None or policy.keep_last is None:
        why = "none is known to be readable" if newest_valid is None else "all are kept"
        reasons = {commit.number: why for commit in live}
    else:
        old = [commit for commit in live if commit.number <= newest_valid]
        for commit in _best(old, policy.keep_best):
            reasons[commit.number] = f"its loss of {commit.facts['loss']:g} is one of the lowest"
        seen: set[int] = set()
        for commit in old:
            step, every = commit.facts["step"], policy.keep_every_steps
            if every is not None and step % every == 0 and step not in seen:
                reasons[commit.number] = f"its step is a multiple of {every}"
            seen.add(step)
        for commit in old[: policy.keep_last]:
            reasons[commit.number] = f"it is one of the last {policy.keep_last}"
        for commit in live[: len(live) - len(old)]:
            reasons[commit.number] = "it is newer than the newest readable one"
        if old:
            reasons[old[0].number] = "it is the newest readable one"
    return [
        Decision(
            commit=commit,
            keep=commit.number in reasons,
            reason=reasons.get(commit.number, "no rule keeps it"),
        )
        for commit in live
    ]


def _best(commits: Sequence[Entry], count: int | None) -> list[Entry]:
    with_loss = [commit for commit in commits if "loss" in commit.facts]
    return sorted(with_loss, key=lambda commit: commit.facts["loss"])[: count or 0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Frontier:
    """Up to where folders are settled: none before it can still be committed.

    Fields:
        first_attempt: The first one that the journal knows. Folders of earlier ones are of a
            journal that was lost: their manifests may be the only proof left.
        before: Folders of later attempts, or of this attempt's saves from this one on, may be
            those of a live writer.
    """

    first_attempt: int
    before: layout.Folder

    def is_settled(self, folder: layout.Folder) -> bool:
        """Whether nobody will ever commit ``folder`` who has not done so."""
        return self.first_attempt <= folder.attempt and folder < self.before


def plan_garbage(keys: Iterable[str], *, live: Collection[str], frontier: Frontier) -> list[str]:
    """Return the keys of checkpoint objects that belong to no checkpoint and never will.

    Pure. Parts of saves that were abandoned or died, and what is left of pruned checkpoints;
    manifests before the parts they name.

    Args:
        keys: Of objects below ``checkpoints/``.
        live: Manifest keys of the commits that exist.
        frontier: Where settled folders end.
    """
    kept = {manifest.rpartition("/")[0] for manifest in live}
    garbage = [
        key
        for key in keys
        if key.rpartition("/")[0] not in kept
        for folder in [layout.parse_folder(key)]
        if folder is not None and frontier.is_settled(folder)
    ]
    return sorted(garbage, key=lambda key: not key.endswith("/manifest.json"))


def plan_stale_uploads(uploads: Iterable[StaleUpload], *, frontier: Frontier) -> list[StaleUpload]:
    """Return the unfinished writes whose writer is gone.

    Pure. In a checkpoint's folder the folder decides; elsewhere, silence of STALE_UPLOAD_S.
    """
    stale = []
    for upload in uploads:
        folder = layout.parse_folder(upload.key)
        is_old = upload.age_s > STALE_UPLOAD_S
        if is_old if folder is None else frontier.is_settled(folder):
            stale.append(upload)
    return stale
