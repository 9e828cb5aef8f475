# SPDX-License-Identifier: Apache-2.0
"""One node of a local cluster: its namespaces, what runs in them, and its Ray processes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from raydist.errors import ClusterError
from raydist.testing.bed_plan import NodePlan
from raydist.testing.network_namespaces import end_processes, list_processes

_HOLDER = """
set -e
bed=$1 node=$2 host=$3
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$node/ray" "$bed/ray"
mount --bind "$node/tmp" "$bed/tmp"
mount --bind "$node/hosts" /etc/hosts
if [ -e /etc/nsswitch.conf ]; then mount --bind "$node/nsswitch.conf" /etc/nsswitch.conf; fi
hostname "$host"
echo ready
exec sleep infinity >/dev/null 2>&1
"""
_REAP_TIMEOUT_S = 10.0
_RAY_START = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block")
_FOR_CLIENTS = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")  # Workers do not inherit them.
_WORKER_TITLE = re.compile(r"^ray::.*RayTrainWorker")


@dataclass(frozen=True, kw_only=True, slots=True)
class RayProcess:
    """A `ray start --block` and what it printed."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def last_words(self) -> str:
        """Return the end of what it printed."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return " / ".join(lines[-3:]) or "it printed nothing"


class LocalNode:
    """Network, mount and host-name namespaces, kept by a process that sleeps in them.

    Args:
        plan: Its name and links; its network namespace is there already.
        bed_folder: The bed's, in which `ray` and `tmp` are each node's own.
        hosts: Its /etc/hosts.
        environment: Of all that is started in it.
    """

    def __init__(
        self, plan: NodePlan, *, bed_folder: Path, hosts: str, environment: Mapping[str, str]
    ) -> None:
        self.plan = plan
        self.folder = bed_folder / f"n{plan.number}"
        self.environment = dict(environment)
        self.rays: list[RayProcess] = []
        self._bed_folder = bed_folder
        self._hosts = hosts
        self._holder: subprocess.Popen[str] | None = None

    def open(self) -> None:
        """Make the namespaces and mounts.

        Raises:
            ClusterError: The kernel or the container refuses them.
        """
        for name in ("ray", "tmp"):
            (self.folder / name).mkdir(parents=True)
        self.write_hosts(self._hosts)
        # Names come from the hosts file alone: a node has no name server to ask.
        (self.folder / "nsswitch.conf").write_text("hosts: files\n")
        self._holder = subprocess.Popen(
            [
                "ip", "netns", "exec", self.plan.host,
                "unshare", "--mount", "--uts", "--propagation", "private",
                "sh", "-c", _HOLDER, "sh", self._bed_folder, self.folder, self.plan.host,
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        if self._holder.stdout is None or self._holder.stdout.readline() != "ready\n":
            _, said = self._holder.communicate()
            raise ClusterError(
                problem=f"Node {self.plan.host} of the local cluster got no namespaces: {said}",
                way_out="A container that runs a local cluster must be privileged.",
            )

    @property
    def is_alive(self) -> bool:
        """Whether it was opened and not killed."""
        return self._holder is not None and self._holder.poll() is None

    def write_hosts(self, text: str) -> None:
        """Replace its /etc/hosts; what runs there sees the new one."""
        self._hosts = text
        (self.folder / "hosts").write_text(text)

    def command(self, command: Sequence[str | Path], *, cwd: Path | None = None) -> list[str]:
        """Return the command line that runs ``command`` inside; its process id stays the same.

        Raises:
            ClusterError: The node was killed.
        """
        if self._holder is None or not self.is_alive:
            raise ClusterError(
                problem=f"Node {self.plan.host} of the local cluster was killed; nothing can be "
                "started there.",
                way_out="Add another with add_node().",
            )
        return [
            "nsenter", "--target", str(self._holder.pid), "--net", "--mount", "--uts", "--",
            # Entering a mount namespace leads to its root directory.
            "env", f"--chdir={cwd or Path.cwd()}", *map(str, command),
        ]  # fmt: skip

    def popen(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a process inside.

        Args:
            command: Program and arguments.
            env: Variables to add to those of the node.
            cwd: This process's when left out.
            options: For subprocess.Popen.
        """
        return subprocess.Popen(
            self.command(command, cwd=cwd), env={**self.environment, **(env or {})}, **options
        )

    def run(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program inside to its end, and return its status and its output as text."""
        return subprocess.run(
            self.command(command, cwd=cwd),
            env={**self.environment, **(env or {})},
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip

    def start_ray(self, arguments: Sequence[str], *, env: dict[str, str]) -> RayProcess:
        """Start `ray start` here and return at once; a node may have several."""
        path = self.folder / f"ray-start-{len(self.rays) + 1}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                self.command([*_RAY_START, *arguments], cwd=self._bed_folder),
                env={k: v for k, v in self.environment.items() if k not in _FOR_CLIENTS} | env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.rays.append(RayProcess(process=process, log=path))
        return self.rays[-1]

    def write_entry(self, variables: Mapping[str, str]) -> Path:
        """Write a program that runs its arguments here, from any terminal of the machine."""
        path = self.folder / "enter"
        exports = "".join(f"export {k}={shlex.quote(v)}\n" for k, v in variables.items())
        into = shlex.join(self.command(())[:-1])
        path.write_text(f'#!/bin/sh\n{exports}exec {into} --chdir="$PWD" "${{@:-bash}}"\n')
        path.chmod(0o700)
        return path

    def processes(self) -> list[int]:
        """Return the ids of all that runs here, the holder left out."""
        holder = self._holder.pid if self._holder else None
        return [pid for pid in list_processes(self.plan.host) if pid != holder]

    def worker_processes(self) -> list[int]:
        """Return the ids of the training workers here, one per rank, the oldest first."""
        found = []
        for pid in self.processes():
            try:
                process = psutil.Process(pid)
                if _WORKER_TITLE.match(" ".join(process.cmdline())):
                    found.append((process.create_time(), pid))
            except psutil.NoSuchProcess:
                continue
        return [pid for _, pid in sorted(found)]

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Signal one process of this node.

        Raises:
            ClusterError: It does not run here.
        """
        if pid not in self.processes():
            raise ClusterError(
                problem=f"Process {pid} does not run on node {self.plan.host} of the local cluster."
            )
        os.kill(pid, number)

    def kill(self) -> None:
        """Kill all that runs here, and the namespaces that nothing else holds."""
        end_processes([self.plan.host])
        self.reap()

    def reap(self) -> None:
        """Collect the statuses of what was started here; it has ended."""
        for ray in self.rays:
            ray.process.wait(_REAP_TIMEOUT_S)
        if self._holder is not None:
            self._holder.communicate(timeout=_REAP_TIMEOUT_S)

    def copy_logs(self, folder: Path) -> None:
        """Copy what Ray and its workers wrote to ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        for log in self.folder.glob("*.log"):
            shutil.copy(log, folder)
        for session in self.log_folders():
            # Symbolic links there name paths as the node saw them.
            shutil.copytree(session, folder, dirs_exist_ok=True, symlinks=True)

    def log_folders(self) -> list[Path]:
        """Return where Ray and its workers write, as this machine sees it."""
        return [
            logs
            for logs in (self.folder / "ray").glob("session_*/logs")
            if not logs.parent.is_symlink()
        ]
