# SPDX-License-Identifier: Apache-2.0
"""What this process's control group allows: memory and CPUs, in versions 1 and 2.

Inside a container the group's own path may not be visible, and its files lie at the root.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_UNLIMITED_BYTES = 1 << 60
"""Version 1 says "no limit" with the largest number of pages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLimits:
    """A control group's limits, None where it sets none.

    Fields:
        memory_used_bytes: By the group, without the file cache that can be dropped.
        num_cpus: Of CPU time per time.
    """

    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    num_cpus: float | None = None


def read_group_limits(
    *, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> GroupLimits:
    """Return the tightest limits of the process's group and those around it."""
    paths = _group_paths(_text(membership))
    memory, used, cpus = None, None, None
    for folder in _folders(root, paths.get("")):
        limit = _limit(folder / "memory.max")
        if limit is not None and (memory is None or limit < memory):
            memory, used = limit, _used(folder, "memory.current", "inactive_file")
        cpus = _least(cpus, _quota(_text(folder / "cpu.max").split()))
    for folder in _folders(root / "memory", paths.get("memory")):
        limit = _limit(folder / "memory.limit_in_bytes")
        if limit is not None and (memory is None or limit < memory):
            memory = limit
            used = _used(folder, "memory.usage_in_bytes", "total_inactive_file")
    for folder in _folders(root / "cpu", paths.get("cpu")):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        cpus = _least(cpus, _quota([_text(folder / name).strip() for name in names]))
    return GroupLimits(memory_bytes=memory, memory_used_bytes=used, num_cpus=cpus)


def _group_paths(text: str) -> dict[str, str]:
    """Return the process's path in each hierarchy; version 2's has the name ''."""
    paths = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    return paths


def _folders(root: Path, path: str | None) -> list[Path]:
    """Return the group's folder and those around it, as far as they are visible here."""
    own = root / (path or "").strip("/")
    return [f for f in (own, *own.parents) if f.is_dir() and (f == root or root in f.parents)]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _limit(path: Path) -> int | None:
    word = _text(path).strip()
    if not word.isdigit() or int(word) >= _UNLIMITED_BYTES:
        return None
    return int(word)


def _used(folder: Path, name: str, droppable: str) -> int | None:
    word = _text(folder / name).strip()
    if not word.isdigit():
        return None
    rows = (line.split() for line in _text(folder / "memory.stat").splitlines())
    dropped = next((int(row[1]) for row in rows if row[0] == droppable), 0)
    return max(0, int(word) - dropped)


def _quota(words: list[str]) -> float | None:
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _least(first: float | None, second: float | None) -> float | None:
    return min((n for n in (first, second) if n is not None), default=None)
