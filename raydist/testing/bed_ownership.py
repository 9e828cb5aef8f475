# SPDX-License-Identifier: Apache-2.0
"""Who ends a local cluster: the program that started it or, after a kill, the next to start one."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from raydist.launch.cluster import short_folder
from raydist.testing.bed_plan import bed_name, owner_of
from raydist.testing.network_namespaces import list_namespaces, remove_namespaces

_OWNER_FILE = "owner.json"


def choose_folder() -> Path:
    """Return a folder that is not there yet; its name is the bed's, and tells this process."""
    parent = Path(short_folder() or tempfile.gettempdir())
    while True:
        folder = parent / bed_name(owner_pid=os.getpid(), number=secrets.randbelow(36**2))
        if not folder.exists():
            return folder


def write_owner(folder: Path) -> None:
    """Write into a bed's folder who is to end it: this process."""
    facts = {"started_unix_s": _start_time(os.getpid()), "pid_namespace": _pid_namespace()}
    (folder / _OWNER_FILE).write_text(json.dumps(facts))


def sweep_leftovers(parent: Path) -> list[str]:
    """End the processes, namespaces and folders of beds whose owner is gone.

    Args:
        parent: Where the beds' folders are.

    Returns:
        Names of the beds that were removed.
    """
    folders = {path.name: path for path in parent.glob("rd*") if owner_of(path.name) is not None}
    folders = {name: path for name, path in folders.items() if (path / _OWNER_FILE).is_file()}
    namespaces = list_namespaces()
    beds = folders.keys() | {name.partition("-")[0] for name in namespaces}
    removed = []
    for bed in sorted(beds):
        if _is_owned(bed, folders.get(bed)):
            continue
        remove_namespaces(name for name in namespaces if name.startswith(f"{bed}-"))
        if bed in folders:
            shutil.rmtree(folders[bed], ignore_errors=True)
        removed.append(bed)
    return removed


def _is_owned(bed: str, folder: Path | None) -> bool:
    """Whether the owner lives, or may live where its process id cannot be seen from here."""
    pid = owner_of(bed)
    facts = {} if folder is None else json.loads((folder / _OWNER_FILE).read_text())
    if facts.get("pid_namespace", _pid_namespace()) != _pid_namespace():
        return True
    started = None if pid is None else _start_time(pid)
    return started is not None and facts.get("started_unix_s", started) == started


def _start_time(pid: int) -> float | None:
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return None


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let SIGTERM unwind the stack instead of ending the process, where nobody else handles it."""
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if is_ours:
        signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
