# SPDX-License-Identifier: Apache-2.0
"""Jobs run as a user runs them, each in processes of its own, and every process they leave."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from raydist.metrics.history import MergedHistory, merge, read_history
from raydist.storage import open_store

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_JOB = ROOT / "jobs" / "llama_zero3.py"
GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH = 8, 64
TOKENS_PER_STEP = GLOBAL_BATCH_SIZE * SEQUENCE_LENGTH

Launcher = Literal["ray", "torchrun", "deepspeed", "submit"]

_BIN = Path(sys.executable).parent
_POLL_S = 0.1
_LOOK_EVERY_S = 1.0  # Reading every process's environment takes 20 ms.
_TINY = {
    "--model.hidden-size": 64,
    "--model.intermediate-size": 128,
    "--model.num-layers": 2,
    "--model.num-attention-heads": 4,
    "--model.num-key-value-heads": 2,
    "--data.sequence-length": SEQUENCE_LENGTH,
    "--batch.global-batch-size": GLOBAL_BATCH_SIZE,
    "--batch.micro-batch-size": 2,
    "--optimizer.warmup-steps": 1,
    "--metrics.sample-tokens": 0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A job that has ended."""

    exit_code: int
    stdout: str
    stderr: str

    def __str__(self) -> str:
        return f"exit {self.exit_code}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


class JobProcess:
    """A job's first process and all that it starts, known by a mark in their environment.

    Ray's agents write over their environment, so a process also belongs when it is in a session
    that a marked process was seen in; the first process begins a session of its own.
    """

    def __init__(
        self, command: list[str], environment: Mapping[str, str], folder: Path, temporary: Path
    ) -> None:
        folder.mkdir(parents=True)
        self._temporary = temporary
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"
        self._mark = uuid.uuid4().hex
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={
                    **environment,
                    "RAYDIST_TEST_JOB": self._mark,
                    "TMPDIR": str(temporary),
                },
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=_hear_interrupts,
            )
        self._sessions = {self._process.pid}

    @property
    def stdout(self) -> str:
        """What it has said so far."""
        return self._stdout.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What it has complained of so far."""
        return self._stderr.read_text(errors="replace")

    def send(self, number: signal.Signals) -> None:
        """Signal the first process alone, as `kill PID` does."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> Finished:
        """Wait for its end; what it runs past the limit ends by process id, and the test fails."""
        begun = looked = time.monotonic()
        while self._process.poll() is None:
            now = time.monotonic()
            if now - looked > _LOOK_EVERY_S:
                self.processes()
                looked = now
            if now - begun > timeout_s:
                self.end()
                raise AssertionError(f"still running after {timeout_s:g} s: {self._finished()}")
            time.sleep(_POLL_S)
        return self._finished()

    def wait_until(self, is_so: Callable[[], Any], what: str, timeout_s: float = 180.0) -> Any:
        """Return the first true value of ``is_so`` while the job runs."""
        deadline = time.monotonic() + timeout_s
        while not (value := is_so()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"never came: {what}. {self._finished()}")
            time.sleep(_POLL_S)
        return value

    def wait_until_gone(self, timeout_s: float) -> None:
        """Wait until no process of the job is left; no temporary file is left then either."""
        deadline = time.monotonic() + timeout_s
        while left := self.processes():
            if time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"left after {timeout_s:g} s: {left}")
            time.sleep(_POLL_S)
        files = {str(path.relative_to(self._temporary)) for path in self._temporary.rglob("*")}
        files -= {name for name in files if name.startswith("torchinductor_")}  # torch's cache
        assert not files, f"temporary files left: {files}"

    def processes(self) -> dict[int, str]:
        """Return the command of each living process of the job, by process id."""
        found: dict[int, str] = {}
        in_session: dict[int, tuple[int, str]] = {}
        for process in psutil.process_iter(["status", "environ", "cmdline"]):
            facts = process.info
            command = " ".join(facts["cmdline"] or ())
            if facts["status"] == psutil.STATUS_ZOMBIE:
                continue
            try:
                session = os.getsid(process.pid)
            except ProcessLookupError:
                continue
            if (facts["environ"] or {}).get("RAYDIST_TEST_JOB") == self._mark:
                found[process.pid] = command
                self._sessions.add(session)
            else:
                in_session[process.pid] = (session, command)
        found |= {p: c for p, (session, c) in in_session.items() if session in self._sessions}
        return found

    def end(self) -> None:
        """Kill what is left of the job, by process id."""
        while left := self.processes():
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self._process.poll()
            time.sleep(_POLL_S)
        self._process.wait()

    def _finished(self) -> Finished:
        code = self._process.returncode
        return Finished(
            exit_code=-1 if code is None else code,
            stdout=self.stdout,
            stderr=self._stderr.read_text(errors="replace"),
        )


class JobRunner:
    """Runs tiny jobs over one small corpus and one storage directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.storage = folder / "runs"
        self.corpus = folder / "corpus"
        self._num_started = 0
        _write_corpus(self.corpus)

    def command(self, *arguments: str, job: Path = DEFAULT_JOB, launcher: Launcher) -> list[str]:
        """Return the command line of a tiny run; the arguments go before what makes it tiny."""
        recipe, rest = [], list(arguments)
        if rest and not rest[0].startswith("-"):
            recipe = [rest.pop(0)]
        tiny = _TINY | {"--data.source": self.corpus, "--storage": self.storage}
        overrides = [str(part) for pair in tiny.items() for part in pair]
        start = {
            "ray": [sys.executable],
            "torchrun": [str(_BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"],
            "deepspeed": [str(_BIN / "deepspeed"), "--num_accelerators", "2"],
            "submit": [str(_BIN / "raydist"), "submit"],
        }[launcher]
        return [*start, str(job.relative_to(ROOT)), *recipe, *overrides, *rest]

    @contextmanager
    def started(
        self,
        *arguments: str,
        job: Path = DEFAULT_JOB,
        launcher: Launcher = "ray",
        env: Mapping[str, str] | None = None,
    ) -> Iterator[JobProcess]:
        """Start a job; at the end of the block, nothing of it is left."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RAY_", "AWS_"))
        }
        self._num_started += 1
        # Short: Ray has unix sockets below it.
        with tempfile.TemporaryDirectory(prefix="rdt-", dir="/tmp") as temporary:
            process = JobProcess(
                self.command(*arguments, job=job, launcher=launcher),
                environment | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"} | dict(env or {}),
                self.folder / f"output-{self._num_started}",
                Path(temporary),
            )
            try:
                yield process
            finally:
                process.end()

    def run(
        self,
        *arguments: str,
        job: Path = DEFAULT_JOB,
        launcher: Launcher = "ray",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 180.0,
    ) -> Finished:
        """Run a job to its end."""
        with self.started(*arguments, job=job, launcher=launcher, env=env) as process:
            return process.wait(timeout_s)

    def history(self, name: str) -> MergedHistory:
        """Return the run's rows, one per step."""
        return merge(read_history(open_store(str(self.storage / name))).rows)

    def last_step(self, name: str) -> int:
        """Return the newest step in the run's metrics, 0 before the first."""
        rows = read_history(open_store(str(self.storage / name))).rows
        return rows[-1]["step"] if rows else 0

    def losses(self, name: str) -> dict[int, float]:
        """Return the run's loss by step."""
        return {row["step"]: row["loss"] for row in self.history(name).rows}


def run_ckpt(*arguments: str, env: Mapping[str, str] | None = None) -> Finished:
    """Run `raydist ckpt`."""
    done = subprocess.run(
        [str(_BIN / "raydist"), "ckpt", *arguments],
        env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return Finished(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def _hear_interrupts() -> None:
    """Undo what a test run in the background hands down: SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _write_corpus(folder: Path) -> None:
    """Write text that is the same every time: 100 sequences, of which 13 steps are an epoch."""
    folder.mkdir(parents=True)
    chance = random.Random(0)
    words = "def return class for while if else import lambda yield with pass break raise".split()
    lines = [" ".join(chance.choice(words) for _ in range(12)) for _ in range(98)]
    (folder / "words.txt").write_text("\n".join(lines))
