# SPDX-License-Identifier: Apache-2.0
"""Findings about hosts: memory, disk, limits, load and clocks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median_low

from raydist.doctor.facts import FolderFacts, NodeFacts
from raydist.doctor.finding import Finding, Severity

MIB, GIB = 1 << 20, 1 << 30

MIN_AVAILABLE_FRACTION = 0.10
"""Ray kills workers at 95 % of memory in use (RAY_memory_usage_threshold): twice that far off."""
MIN_AVAILABLE_BYTES = 2 * GIB
"""One rank's libraries and buffers, before a model."""
MIN_SHM_BYTES = GIB
"""NCCL takes some 10 MiB of /dev/shm for each pair of ranks on a node, data loaders more."""
CONTAINER_SHM_BYTES = 64 * MIB
"""What a container gets when nobody says --shm-size."""
RAY_MIN_FREE_FRACTION = 0.05
"""Ray refuses to spill objects to a disk that is 95 % full (RAY_local_fs_capacity_threshold)."""
LOW_FREE_FRACTION = 0.10
"""Twice that far off."""
MIN_RAY_FREE_BYTES = 10 * GIB
"""Logs and packages of a long run, and Ray Data's spilling."""
MIN_FREE_BYTES = GIB
"""For other folders: caches and temporary files."""
MIN_OPEN_FILES = 1024
"""Fewer are used up by Ray's own processes on a node of many cores."""
GOOD_OPEN_FILES = 8192
"""What Ray asks for at least."""
RAY_RAISES_TO = 65536
"""Ray raises the soft limit to the hard one, this far."""
SKEW_S = 1.0
"""Logs of several nodes can no longer be put in order."""
BAD_SKEW_S = 60.0
"""No synchronised clock is this wrong; S3 refuses requests at 15 minutes."""
LOAD_PER_CPU = 2.0
"""More runnable threads than this for each CPU is somebody else's work."""


def examine_hosts(nodes: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """Yield what is short or wrong on the hosts of ``nodes``."""
    for label, facts in nodes.items():
        yield from _memory(label, facts)
        yield from _shared_memory(label, facts)
        yield from _folders(label, facts)
        yield from _limits(label, facts)
        if facts.load_1min > LOAD_PER_CPU * facts.num_cpus:
            yield Finding(
                severity="note",
                check="load",
                where=(label,),
                what=f"The load is {facts.load_1min:.1f} on {facts.num_cpus:g} CPUs.",
                why="Other work takes CPU time from the ranks; every step waits for the slowest.",
                what_to_do="Look at top there, if it stays so.",
            )
    yield from _clocks(nodes)


def _memory(label: str, facts: NodeFacts) -> Iterator[Finding]:
    memory = facts.memory
    least = max(MIN_AVAILABLE_BYTES, int(MIN_AVAILABLE_FRACTION * memory.usable_bytes))
    if memory.available_bytes < least:
        limit = " (its control group's limit)" if memory.limit_bytes else ""
        yield Finding(
            severity="warning",
            check="host memory",
            where=(label,),
            what=f"{memory.available_bytes / GIB:.1f} GiB of {memory.usable_bytes / GIB:.1f} GiB"
            f"{limit} are available.",
            why="Ray kills ranks when a node's memory is 95 % in use.",
            what_to_do="End what uses it, or leave out the node.",
        )


def _shared_memory(label: str, facts: NodeFacts) -> Iterator[Finding]:
    total, free = facts.memory.shm_total_bytes, facts.memory.shm_free_bytes
    if total is None or free is None:
        return
    is_tiny = total <= CONTAINER_SHM_BYTES or free < CONTAINER_SHM_BYTES
    if not is_tiny and free >= MIN_SHM_BYTES:
        return
    yield Finding(
        severity="failure" if is_tiny and facts.gpus else "warning",
        check="/dev/shm",
        where=(label,),
        what=f"/dev/shm has {total / MIB:.0f} MiB, {free / MIB:.0f} MiB of them free.",
        why="NCCL talks through it between the ranks of a node and fails without space; Ray keeps "
        "its objects there, else on disk.",
        what_to_do="Start the container with a larger one: docker --shm-size, in Kubernetes an "
        "emptyDir with medium: Memory at /dev/shm.",
    )


def _folders(label: str, facts: NodeFacts) -> Iterator[Finding]:
    devices: dict[int, list[FolderFacts]] = {}
    for folder in facts.folders:
        devices.setdefault(folder.device, []).append(folder)
    for folders in devices.values():
        ours = next((f for f in folders if f.purpose == "ray"), None)
        folder = ours or folders[0]
        severity = _disk_severity(folder)
        if severity is None:
            continue
        yield Finding(
            severity=severity,
            check="disk",
            where=(label,),
            what=f"{folder.path} ({folder.purpose}) has {folder.free_bytes / GIB:.1f} GiB free of "
            f"{folder.total_bytes / GIB:.1f} GiB.",
            why="Above 95 % in use Ray refuses to spill objects, and runs that need it fail."
            if ours
            else "A full disk ends the run where it writes next.",
            what_to_do="Make room there"
            + (", or start Ray with --temp-dir on another disk." if ours else "."),
        )


def _disk_severity(folder: FolderFacts) -> Severity | None:
    free = folder.free_bytes / max(1, folder.total_bytes)
    if folder.purpose != "ray":
        return "warning" if folder.free_bytes < MIN_FREE_BYTES else None
    if free < RAY_MIN_FREE_FRACTION:
        return "failure"
    is_low = free < LOW_FREE_FRACTION or folder.free_bytes < MIN_RAY_FREE_BYTES
    return "warning" if is_low else None


def _limits(label: str, facts: NodeFacts) -> Iterator[Finding]:
    limits = facts.limits
    if limits.open_files_soft is not None:
        hard = RAY_RAISES_TO if limits.open_files_hard is None else limits.open_files_hard
        allowed = max(limits.open_files_soft, min(hard, RAY_RAISES_TO))
        if allowed < GOOD_OPEN_FILES:
            yield Finding(
                severity="failure" if allowed < MIN_OPEN_FILES else "warning",
                check="open files",
                where=(label,),
                what=f"A process may have {allowed} open files; Ray asks for {GOOD_OPEN_FILES}.",
                why="Every peer, actor and object takes some; connections fail when none are left.",
                what_to_do="Raise it before ray start: ulimit -n 65536, LimitNOFILE= of the "
                "service, or the container's --ulimit nofile.",
            )
    locked = limits.locked_memory_bytes
    is_short = locked is not None and locked < facts.memory.usable_bytes
    if is_short and not limits.can_lock_all:
        size = f"{(locked or 0) / MIB:g} MiB"
        has_rdma = bool(facts.rdma_devices)
        yield Finding(
            severity="failure" if has_rdma else "note",
            check="locked memory",
            where=(label,),
            what=f"A process may lock {size} of memory"
            + (f"; there is {', '.join(facts.rdma_devices)}." if has_rdma else "."),
            why="RDMA registers its buffers as locked memory, and NCCL fails when it may not."
            if has_rdma
            else "It matters to RDMA only, and there is no such device.",
            what_to_do="Set ulimit -l unlimited, LimitMEMLOCK=infinity of the service, or give "
            "the container IPC_LOCK.",
        )


def _clocks(nodes: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """Yield clocks that are off by more than the measurement may be.

    Of three and more the middle one is taken to be right, of fewer the asker's.
    """
    offsets = {label: facts.clock for label, facts in nodes.items() if facts.clock}
    middle = median_low([o.offset_s for o in offsets.values()]) if len(offsets) > 2 else 0.0
    than = "most nodes" if len(offsets) > 2 else "the machine that asked"
    for label, offset in offsets.items():
        skew_s = offset.offset_s - middle
        sure_s = abs(skew_s) - offset.round_trip_s / 2
        if sure_s <= SKEW_S:
            continue
        yield Finding(
            severity="failure" if sure_s > BAD_SKEW_S else "warning",
            check="clock",
            where=(label,),
            what=f"The clock is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} "
            f"{than}, give or take {offset.round_trip_s / 2:.2f} s.",
            why="S3 refuses requests that are 15 minutes off (RequestTimeTooSkewed), certificates "
            "and credentials expire early, and logs cannot be put in order.",
            what_to_do="Synchronise it: chronyc makestep, or timedatectl set-ntp true.",
        )
