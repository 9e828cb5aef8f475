# SPDX-License-Identifier: Apache-2.0
"""A one-node Ray cluster with a job server, started for one job and stopped by process id."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from raydist.errors import ClusterError
from raydist.launch.cluster import short_folder

_READY_TIMEOUT_S = 90.0
_STOP_TIMEOUT_S = 15.0
_PORT_OPTIONS = (
    "--port",
    "--dashboard-port",
    "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port",
    "--runtime-env-agent-port",
    "--metrics-export-port",
    "--node-manager-port",
    "--object-manager-port",
    "--ray-client-server-port",
)


class LocalHead:
    """`ray start --head` on free ports, its job server on loopback, with a token of its own.

    Another Ray on this machine is neither joined nor disturbed: ports, directory, token and
    processes are this one's, and exactly these processes are ended.
    """

    def __init__(self, *, cwd: str) -> None:
        self._cwd = cwd
        self.folder = Path(tempfile.mkdtemp(prefix="rd-", dir=short_folder()))
        self._token = self.folder / "token"
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: dict[str, int] = {}

    @property
    def job_address(self) -> str:
        """URL of the job server."""
        return f"http://127.0.0.1:{self._ports['--dashboard-port']}"

    @property
    def address(self) -> str:
        """What RAY_ADDRESS is to be, for a driver that joins this cluster."""
        return f"{socket.gethostbyname(socket.gethostname())}:{self._ports['--port']}"

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment plus what a client of this cluster needs."""
        return {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Job drivers and workers find this environment's python and tools first.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }

    def __enter__(self) -> LocalHead:
        self._token.touch(mode=0o600)
        self._token.write_text(secrets.token_hex(32))
        self._ports = dict(zip(_PORT_OPTIONS, _free_ports(len(_PORT_OPTIONS)), strict=True))
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
            "--dashboard-host=127.0.0.1",
            "--include-dashboard=true", "--disable-usage-stats",
            f"--temp-dir={self.folder / 'ray'}",
            *(f"{option}={port}" for option, port in self._ports.items()),
        ]  # fmt: skip
        log = open(self.folder / "head.log", "wb")
        try:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._cwd,
                env={**self.environment, "TMPDIR": str(self.folder)},
                start_new_session=True,
            )
            self._wait_until_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        finally:
            log.close()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            end_process_tree(self._process)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        port = self._ports["--dashboard-port"]
        while time.monotonic() < deadline:
            if self._process is not None and self._process.poll() is not None:
                break
            try:
                socket.create_connection(("127.0.0.1", port), 0.5).close()
            except OSError:
                time.sleep(0.1)
            else:
                return
        log = (self.folder / "head.log").read_text(errors="replace").strip().splitlines()
        raise ClusterError(
            problem=f"The local Ray head did not come up within {_READY_TIMEOUT_S:g} s: "
            f"{log[-1] if log else 'it printed nothing'}",
            way_out="Look for a full /tmp or /dev/shm, or set RAY_ADDRESS to a running cluster.",
        )


def end_process_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process and everything it started: asked first, then killed. By process id."""
    import psutil

    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(family, timeout=3)
    for straggler in alive:
        straggler.kill()
    psutil.wait_procs(alive, timeout=5)


def _free_ports(count: int) -> list[int]:
    """Return distinct ports that are free now; all are held until the last is found."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
