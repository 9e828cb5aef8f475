# SPDX-License-Identifier: Apache-2.0
"""Saves that take longer than the interval between them. Real: torchrun, gloo, DeepSpeed, files.

Faked: the store's slowness, by a wait before each data object.
"""

from __future__ import annotations

import json

import pytest
from job_process import ROOT, JobRunner, run_ckpt

_JOB = ROOT / "tests/integration/jobs/slow_store_llama.py"
_ENV = {"SLOW_STORE_S": "1.5", "DS_ACCELERATOR": "cpu"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("when_busy", ["wait", "skip"])
def test_saves_longer_than_their_interval_change_no_loss_and_are_all_valid(
    jobs: JobRunner, unfaulted: dict[int, float], when_busy: str
) -> None:
    done = jobs.run(
        "--name", "slow", "--num-steps", "20", "--checkpoint.every-steps", "5",
        "--checkpoint.when-busy", when_busy, job=_JOB, launcher="torchrun", env=_ENV,
    )  # fmt: skip
    assert done.exit_code == 0, done
    assert jobs.losses("slow") == unfaulted
    rows = {row["step"]: row for row in jobs.history("slow").rows}
    waited = [row["save_wait_s"] for row in rows.values()]
    skipped = [step - 1 for step, row in rows.items() if row["save_skipped"]]
    listed = json.loads(run_ckpt("ls", "--json", str(jobs.storage / "slow")).stdout)
    steps = [info["step"] for info in listed]
    if when_busy == "wait":
        assert steps == [20, 15, 10, 5]
        assert sum(seconds > 0 for seconds in waited) >= 2, waited
        assert skipped == []
    else:
        assert steps[0] == 20
        assert skipped, rows
        assert sorted({*steps, *skipped}) == [5, 10, 15, 20]
        assert not any(waited), waited
    assert rows[6]["save_s"] > 0
    assert max(row["step_time_s"] + row["save_s"] for row in rows.values()) > 0
    verified = run_ckpt("verify", str(jobs.storage / "slow"))
    assert verified.exit_code == 0, verified
