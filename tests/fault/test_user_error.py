# SPDX-License-Identifier: Apache-2.0
"""The job's own code fails. Real: Ray, gloo, DeepSpeed; the job is tests/fault/jobs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from job_process import ROOT, JobRunner, run_ckpt

_JOB = ROOT / "tests" / "fault" / "jobs" / "failing_llama.py"


@pytest.mark.timeout(400)
def test_exception_on_all_ranks_ends_the_run_at_once_with_its_traceback(jobs: JobRunner) -> None:
    with jobs.started("raises_value_error", job=_JOB) as process:
        done = process.wait(180)
        process.wait_until_gone(20)
    assert done.exit_code == 3, done
    assert re.search(r'failing_llama\.py", line \d+, in loss_fn', done.stderr), done
    assert "ValueError: the third batch is not to my liking" in done.stderr
    assert "restart" not in done.stdout
    assert [row["attempt"] for row in jobs.history("raises-value-error").rows] == [1]


@pytest.mark.timeout(400)
def test_loss_that_turns_nan_is_skipped_counted_and_ends_the_run(jobs: JobRunner) -> None:
    arguments = ("--checkpoint.every-steps", "5", "--fault.max-nonfinite-steps", "3")
    done = jobs.run("turns_nan", *arguments, job=_JOB)
    assert done.exit_code == 6, done
    assert done.stderr.startswith("NumericsError: 3 steps in a row up to step 9"), done
    for advice in ("optimizer.learning_rate=0.003", "optimizer.warmup_steps=1",
                   "fault.max_nonfinite_steps=3", "the last checkpoint is untouched"):  # fmt: skip
        assert advice in done.stderr
    rows = jobs.history("turns-nan").rows
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert [row["skipped_steps"] for row in rows] == [0] * 6 + [1, 2, 3]
    assert [row["loss"] is None for row in rows] == [False] * 6 + [True] * 3

    run_url = str(jobs.storage / "turns-nan")
    verified = run_ckpt("verify", run_url)
    assert verified.exit_code == 0, verified
    assert re.findall(r"step +(\d+)", verified.stdout) == ["5"]
    healthy = jobs.run("--name", "turns-nan", "--num-steps", "20", "--resume", "must",
                       launcher="torchrun")  # fmt: skip
    assert healthy.exit_code == 0, healthy
    assert "resuming run turns-nan at step 5 of 20" in healthy.stdout


@pytest.mark.timeout(400)
def test_rank_that_exits_every_time_spends_the_restarts(jobs: JobRunner) -> None:
    with jobs.started("rank_exits", "--fault.max-worker-failures", "1", job=_JOB) as process:
        done = process.wait(240)
        process.wait_until_gone(20)
    assert done.exit_code == 4, done
    assert "rank 1 was lost; restart 1 of 1" in done.stdout
    assert "restart 2" not in done.stdout
    assert done.stderr.startswith("WorkerLostError: Rank 1 died"), done
    assert "fault.max_worker_failures=1 restarts are spent" in done.stderr
    log = Path(re.findall(r"^log: file://(.*)$", done.stdout, re.MULTILINE)[0])
    assert "A worker died" in log.read_text()
    assert "Traceback" not in done.stderr
