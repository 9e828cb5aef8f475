# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM in mid-training. Real: `raydist submit`, Ray, signals to one process."""

from __future__ import annotations

import signal

import pytest
from job_process import JobRunner, Launcher

_RUN = ("--name", "stopped", "--num-steps", "4000", "--optimizer.decay-steps", "4000",
        "--checkpoint.every-steps", "5")  # fmt: skip
_GONE_WITHIN_S = 20


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        ("submit", signal.SIGINT),
        ("submit", signal.SIGTERM),
        ("ray", signal.SIGINT),
        ("ray", signal.SIGTERM),
    ],
)
def test_stopped_job_leaves_no_process_and_its_commits(
    jobs: JobRunner, launcher: Launcher, number: signal.Signals
) -> None:
    with jobs.started(*_RUN, launcher=launcher) as process:
        process.wait_until(lambda: jobs.last_step("stopped") >= 6, "step 6")
        started = process.processes()
        assert any("gcs_server" in command for command in started.values())
        process.send(number)
        done = process.wait(120)
        process.wait_until_gone(_GONE_WITHIN_S)
    assert done.exit_code == 130, done
    assert "Traceback" not in done.stderr, done

    if launcher == "submit" and number is signal.SIGINT:
        resumed = jobs.run(*_RUN[:2], "--num-steps", str(jobs.last_step("stopped") + 2),
                           *_RUN[4:], launcher="torchrun")  # fmt: skip
        assert resumed.exit_code == 0, resumed
        assert "resuming run stopped at step " in resumed.stdout
