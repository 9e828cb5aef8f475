# SPDX-License-Identifier: Apache-2.0
"""`raydist submit JOB [ARGUMENTS]`: submit a job, follow it, and end with its exit status."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from raydist.errors import ClusterError, ConfigError, FailureKind

USAGE = """usage: raydist submit JOB.py [ARGUMENTS]

Submits the job with `ray job submit`, follows it and returns its exit status. With RAY_ADDRESS
set to a job server (http://HOST:8265) the working directory is packaged and sent there; without
it, a one-node Ray is started here for the job and stopped afterwards.
"""

_CLIENT_LINES = re.compile(
    r"^(Job submission server address:|-{5,}|Job '.*' (submitted|succeeded|failed)|Next steps|"
    r"\s+(Query the|Request the|ray job )|Tailing logs until|"
    r"\d{4}-\d\d-\d\d .*(INFO|SUCC|ERR) (sdk|dashboard_sdk|cli|packaging|job_manager|worker)\.py)"
)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def run(arguments: Sequence[str]) -> int:
    """Submit, follow, and return the job's exit status.

    Raises:
        ConfigError: No such job file.
        ClusterError: The cluster cannot be reached.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else FailureKind.INPUT.exit_code
    job, rest = arguments[0], list(arguments[1:])
    if not Path(job).is_file():
        raise ConfigError(
            problem=f"There is no job file {job} (from {Path.cwd()}).",
            way_out="Name the job's .py file, relative to the directory to package.",
        )
    address = os.environ.get("RAY_ADDRESS", "").strip()
    if address:
        package = ["--working-dir", ".", "--runtime-env-json", '{"excludes": [".git", ".venv"]}']
        return _submit(address, dict(os.environ), [job, *rest], package)
    from raydist.launch.local_head import LocalHead

    with _sigterm_interrupts(), LocalHead(cwd=str(Path.cwd())) as head:
        return _submit(head.job_address, head.environment, [job, *rest], [])


def _submit(
    address: str, environment: dict[str, str], command: list[str], package: list[str]
) -> int:
    submission = f"raydist-{uuid.uuid4().hex[:12]}"
    environment = {**environment, "PYTHONUNBUFFERED": "1"}
    environment.setdefault("RAY_AUTH_MODE", "token")
    client = subprocess.Popen(
        [
            sys.executable, "-m", "ray.scripts.scripts", "job", "submit",
            f"--address={address}", f"--submission-id={submission}", *package,
            "--", "python", *command,
        ],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    kept: list[str] = []
    try:
        for line in client.stdout or ():
            if _CLIENT_LINES.match(_ANSI.sub("", line)) or not line.strip():
                kept.append(line)
                continue
            print(line, end="", flush=True)
        client.wait()
    except BaseException:
        print("stopping the job", file=sys.stderr, flush=True)
        _stop(address, submission, environment)
        raise
    finally:
        if client.poll() is None:
            client.kill()
            client.wait()
    return _exit_status(address, submission, environment, kept)


def _exit_status(
    address: str, submission: str, environment: dict[str, str], client_lines: list[str]
) -> int:
    """Return the exit status of the job's driver, as the job server recorded it.

    Raises:
        ClusterError: The job never got there.
    """
    with _environment(environment):
        from ray.job_submission import JobStatus, JobSubmissionClient

        try:
            info = JobSubmissionClient(address).get_job_info(submission)
        except (ConnectionError, RuntimeError) as error:
            said = [line.strip() for line in client_lines if line.strip()]
            raise ClusterError(
                problem=f"The job was not taken by {address}: "
                f"{said[-1] if said else str(error).splitlines()[0]}",
                way_out="Check RAY_ADDRESS, RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH.",
            ) from error
    if info.driver_exit_code is not None:
        return info.driver_exit_code
    if info.status == JobStatus.SUCCEEDED:
        return 0
    print(f"job {submission} ended as {info.status}: {info.message}", file=sys.stderr)
    return FailureKind.WORKER_LOST.exit_code


def _stop(address: str, submission: str, environment: dict[str, str]) -> None:
    subprocess.run(
        [
            sys.executable, "-m", "ray.scripts.scripts", "job", "stop",
            f"--address={address}", submission,
        ],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
        start_new_session=True, timeout=60,
    )  # fmt: skip


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
