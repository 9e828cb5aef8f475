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

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_CLIENT_LINE = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+\s+(INFO|SUCC|ERR|WARNING) \w+\.py:\d+ -- ")
_FIRST_JOB_LINE_AFTER = "Tailing logs until the job exits"


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
        if not address.startswith(("http://", "https://")):
            raise ConfigError(
                problem=f"RAY_ADDRESS={address} is not the address of a job server.",
                way_out="Set RAY_ADDRESS to http://HOST:8265, the head's dashboard.",
            )
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
    submit = [
        "submit", f"--address={address}", f"--submission-id={submission}", *package,
        "--", "python", *command,
    ]  # fmt: skip
    logs = ["logs", f"--address={address}", "--follow", submission]
    shown, said = _follow(submit, submission, environment, address, skip=0)
    while (status := _exit_status(address, submission, environment, said)) is None:
        # The stream was cut, the job goes on: follow it from where it was left.
        shown, _ = _follow(logs, submission, environment, address, skip=shown)
    return status


def _follow(
    arguments: list[str], submission: str, environment: dict[str, str], address: str, *, skip: int
) -> tuple[int, str]:
    """Run one `ray job` command and show the job's own lines.

    Args:
        arguments: Of `ray job`.
        submission: Of the job that is followed.
        environment: For the client.
        address: Of the job server.
        skip: Job lines that were shown before.

    Returns:
        Job lines shown so far, and the last thing that the client itself said.
    """
    client = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "job", *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    count, said = 0, ""
    is_job = arguments[0] == "logs"
    held: list[str] = []  # lines of a frame, which may be the job's or the client's
    try:
        for raw in client.stdout or ():
            line = _ANSI.sub("", raw)
            if not is_job or _CLIENT_LINE.match(line):
                said = line.strip() or said
                is_job = is_job or _FIRST_JOB_LINE_AFTER in line
            elif f"Job '{submission}'" in line:
                held, said = [], line.strip()
            elif not line.strip() or set(line.strip()) == {"-"}:
                held.append(raw)
            else:
                for own in (*held, raw):
                    count += 1
                    if count > skip:
                        print(own, end="", flush=True)
                held = []
        client.wait()
    except BaseException:
        print("stopping the job", file=sys.stderr, flush=True)
        _stop(address, submission, environment)
        raise
    finally:
        if client.poll() is None:
            client.kill()
            client.wait()
    return max(count, skip), said


def _exit_status(
    address: str, submission: str, environment: dict[str, str], said: str
) -> int | None:
    """Return the exit status of the job's driver as the job server has it, None while it runs.

    Raises:
        ClusterError: The job never got there.
    """
    with _environment(environment):
        from ray.exceptions import RayError
        from ray.job_submission import JobStatus, JobSubmissionClient

        try:
            info = JobSubmissionClient(address).get_job_info(submission)
        except (ConnectionError, RuntimeError, RayError) as error:
            raise ClusterError(
                problem=f"The job was not taken by {address}: {said or str(error).splitlines()[0]}",
                way_out="Check RAY_ADDRESS, RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH.",
            ) from error
    if not info.status.is_terminal():
        return None
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
