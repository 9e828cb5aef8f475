# SPDX-License-Identifier: Apache-2.0
"""A rank is killed between two commits. Real: Ray, gloo, DeepSpeed, SIGKILL, the file system."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import pytest
from job_process import TOKENS_PER_STEP, JobRunner, run_ckpt

_NUM_STEPS, _EVERY_STEPS = 20, 5


@pytest.mark.timeout(400)
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_costs_one_interval_and_changes_no_loss(
    jobs: JobRunner, unfaulted: dict[int, float], rank: int
) -> None:
    with socket.create_server(("0.0.0.0", 0)) as free:
        port = free.getsockname()[1]
    arguments = (
        "--name", "killed", "--num-steps", str(_NUM_STEPS),
        "--checkpoint.every-steps", str(_EVERY_STEPS), "--network.master-port", str(port),
    )  # fmt: skip
    with jobs.started(*arguments) as process:
        process.wait_until(lambda: jobs.last_step("killed") >= 1, "step 1")
        pid = int(re.findall(rf"rank {rank}: .* \(pid (\d+)\)", process.stdout)[0])
        assert pid in process.processes()
        process.wait_until(lambda: jobs.last_step("killed") >= 7, "step 7")
        os.kill(pid, signal.SIGKILL)
        done = process.wait(240)
        assert done.exit_code == 0, done
        process.wait_until_gone(20)
    assert not [path for path in Path("/dev/shm").iterdir() if f"_{port}_" in path.name]

    assert "finished 20 steps" in done.stdout
    assert f"rank {rank} was lost; restart 1 of 3" in done.stdout
    history = jobs.history("killed")
    steps = [row["step"] for row in history.rows]
    assert steps == list(range(1, _NUM_STEPS + 1))
    assert [row["tokens_seen"] for row in history.rows] == [
        step * TOKENS_PER_STEP for step in steps
    ]
    assert {row["attempt"] for row in history.rows} == {1, 2}
    assert len(history.repeated_steps) <= _EVERY_STEPS
    assert jobs.losses("killed") == unfaulted

    verified = run_ckpt("verify", str(jobs.storage / "killed"))
    assert verified.exit_code == 0, verified
    assert re.findall(r"step +(\d+) .* ok", verified.stdout) == ["20", "15", "10", "5"]
