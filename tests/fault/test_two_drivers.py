# SPDX-License-Identifier: Apache-2.0
"""Two drivers of one run. Real: Ray for the first, torchrun for the one that takes over."""

from __future__ import annotations

import pytest
from job_process import JobRunner, run_ckpt

from raydist.checkpoint.journal import Journal
from raydist.storage import open_store

_RUN = ("--name", "shared", "--num-steps", "4000", "--optimizer.decay-steps", "4000")


@pytest.mark.timeout(500)
def test_second_driver_is_refused_and_takes_over_when_told_to(jobs: JobRunner) -> None:
    with jobs.started(*_RUN, "--checkpoint.every-steps", "5") as first:
        first.wait_until(lambda: jobs.last_step("shared") >= 6, "step 6")

        refused = jobs.run(*_RUN, env={"RAY_ADDRESS": "127.0.0.1:1"})
        assert refused.exit_code == 2, refused
        assert refused.stderr.startswith("RunAliveError: Run shared is being trained"), refused
        assert "attempt 1" in refused.stderr
        assert "--takeover" in refused.stderr
        assert "Traceback" not in refused.stderr

        step = jobs.last_step("shared")
        with jobs.started(*_RUN, "--checkpoint.every-steps", "20", "--takeover",
                          launcher="torchrun") as second:  # fmt: skip
            fenced = first.wait(240)
            first.wait_until_gone(20)
            assert fenced.exit_code == 7, fenced
            assert "FencedError: Attempt 1 of run shared was replaced by attempt 2" in fenced.stderr
            assert "Traceback" not in fenced.stderr
            second.wait_until(lambda: _commits_of(jobs, attempt=2), "a commit of attempt 2")

    journal = _entries(jobs)
    taken_over = next(e.number for e in journal if e.kind == "opened" and e.attempt == 2)
    assert {e.attempt for e in journal if e.number < taken_over} == {1}
    assert {e.attempt for e in journal if e.number > taken_over} == {2}
    resumed_at = max(e.facts["step"] for e in journal[: taken_over - 1] if e.kind == "committed")
    assert resumed_at >= step - 5
    assert f"resuming run shared at step {resumed_at} of 4000" in second.stdout
    verified = run_ckpt("verify", str(jobs.storage / "shared"))
    assert verified.exit_code == 0, verified


def _entries(jobs: JobRunner) -> list:
    journal = Journal(open_store(str(jobs.storage / "shared")))
    tail = journal.tail()
    return [journal.read(number) for number in range(1, tail.number + 1)]


def _commits_of(jobs: JobRunner, *, attempt: int) -> list:
    return [e for e in _entries(jobs) if e.kind == "committed" and e.attempt == attempt]
