# SPDX-License-Identifier: Apache-2.0
"""Collecting the facts of the machine this process is on. Imports no torch; changes nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from raydist.clock import Clock
from raydist.doctor.control_group import GroupLimits, read_group_limits
from raydist.doctor.facts import (
    FolderFacts,
    FolderPurpose,
    LimitFacts,
    MemoryFacts,
    NodeFacts,
    OpFacts,
)
from raydist.doctor.nvidia import read_gpus

_DISTRIBUTIONS = ("raydist", "torch", "ray", "deepspeed", "transformers", "numpy")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_CAP_IPC_LOCK = 1 << 14
"""Source: linux/capability.h."""


def collect_node_facts(
    *,
    node: str,
    node_id: str,
    address: str,
    clock: Clock,
    folders: Mapping[FolderPurpose, str] | None = None,
) -> NodeFacts:
    """Describe this machine in about a second; what it does not have is not an error.

    Args:
        node: The node's name.
        node_id: Its identity in the cluster.
        address: The address by which the cluster knows it.
        clock: Time, for the age of lock files.
        folders: Folders to look at beside the temporary one and home, such as Ray's own.
    """
    group = read_group_limits()
    gpus = read_gpus()
    versions = software_versions()
    if gpus.driver:
        versions["driver"] = gpus.driver
    places: dict[FolderPurpose, str] = {"temporary": tempfile.gettempdir(), **(folders or {})}
    home = os.path.expanduser("~")
    if home != "~":  # a container's user may have none
        places["home"] = home
    return NodeFacts(
        node=node,
        node_id=node_id,
        address=address,
        versions=versions,
        memory=_memory(group),
        limits=_limits(),
        num_cpus=_num_cpus(group),
        load_1min=os.getloadavg()[0],
        gpus=gpus.gpus,
        gpu_pairs=gpus.pairs,
        gpu_problem=gpus.problem,
        folders=tuple(read_folder(purpose, path) for purpose, path in places.items()),
        ops=read_ops(extensions_folder(os.environ), now_unix_s=clock.now_unix_s()),
        rdma_devices=_names(Path("/sys/class/infiniband")),
    )


def software_versions() -> dict[str, str]:
    """Return the versions of what ranks must agree on; what is not installed has no entry."""
    found = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
        "machine": platform.machine(),
    }
    for name in _DISTRIBUTIONS:
        _add_version(found, name, name)
    for name in _NCCL:
        if "nccl" not in found:
            _add_version(found, "nccl", name)
    spec = importlib.util.find_spec("torch")  # finds it without importing it
    if spec is not None and spec.origin is not None:
        found |= torch_build((Path(spec.origin).parent / "version.py").read_text())
    return found


def _add_version(found: dict[str, str], key: str, distribution: str) -> None:
    try:
        found[key] = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return


def torch_build(text: str) -> dict[str, str]:
    """Return torch's full version and its CUDA from its version.py: metadata may lack both."""
    names = {"__version__": "torch", "cuda": "cuda"}
    rows = re.findall(r"^(\w+)(?:\s*:[^=\n]+)?\s*=\s*'([^']+)'", text, re.MULTILINE)
    return {names[name]: value for name, value in rows if name in names}


def _memory(group: GroupLimits) -> MemoryFacts:
    memory = psutil.virtual_memory()
    available = memory.available
    if group.memory_bytes is not None and group.memory_used_bytes is not None:
        available = min(available, max(0, group.memory_bytes - group.memory_used_bytes))
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    is_lower = group.memory_bytes is not None and group.memory_bytes < memory.total
    return MemoryFacts(
        total_bytes=memory.total,
        available_bytes=available,
        limit_bytes=group.memory_bytes if is_lower else None,
        shm_total_bytes=shm.total if shm else None,
        shm_free_bytes=shm.free if shm else None,
    )


def _limits() -> LimitFacts:
    import resource

    def limits(kind: int) -> tuple[int | None, int | None]:
        soft, hard = resource.getrlimit(kind)
        unlimited = resource.RLIM_INFINITY
        return (None if soft == unlimited else soft, None if hard == unlimited else hard)

    open_files = limits(resource.RLIMIT_NOFILE)
    locked = limits(resource.RLIMIT_MEMLOCK) if hasattr(resource, "RLIMIT_MEMLOCK") else (None,)
    return LimitFacts(
        open_files_soft=open_files[0],
        open_files_hard=open_files[1],
        locked_memory_bytes=locked[0],
        processes=limits(resource.RLIMIT_NPROC)[0],
        can_lock_all=_capabilities() & _CAP_IPC_LOCK != 0,
    )


def _capabilities() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status.read_text(), re.MULTILINE)
    return int(found[1], 16) if found else 0


def _num_cpus(group: GroupLimits) -> float:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(float(allowed or 1), group.num_cpus or float("inf"))


def read_folder(purpose: FolderPurpose, path: str) -> FolderFacts:
    """Describe the filesystem at ``path``, or at the nearest folder above it that exists."""
    there = Path(path).absolute()
    while not there.is_dir():
        there = there.parent
    usage = shutil.disk_usage(there)
    return FolderFacts(
        purpose=purpose,
        path=path,
        total_bytes=usage.total,
        free_bytes=usage.free,
        device=there.stat().st_dev,
    )


def extensions_folder(environment: Mapping[str, str]) -> Path:
    """Return where this node's torch extensions are built: set, beside Python, or in the cache."""
    beside = Path(sys.prefix, "torch_extensions")
    if environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(environment["TORCH_EXTENSIONS_DIR"])
    if os.access(sys.prefix, os.W_OK) or beside.is_dir():
        return beside
    cache = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "torch_extensions")


def read_ops(folder: Path, *, now_unix_s: float) -> OpFacts:
    """Return the ops with a library below ``folder``, and lock files that lie there.

    An op has a folder of its own, in torch's own cache below one for the build of torch.
    """
    libraries = {path.parent.name for path in _at_depth(folder, "*.so")}
    locks = []
    for path in _at_depth(folder, "lock"):
        try:
            locks.append((str(path), max(0.0, now_unix_s - path.stat().st_mtime)))
        except FileNotFoundError:  # its builder has just finished
            continue
    return OpFacts(folder=str(folder), built=tuple(sorted(libraries)), locks=tuple(locks))


def _at_depth(folder: Path, pattern: str) -> list[Path]:
    return sorted([*folder.glob(f"*/{pattern}"), *folder.glob(f"*/*/{pattern}")])


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else ()
