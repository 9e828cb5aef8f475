# SPDX-License-Identifier: Apache-2.0
"""One job, four ways to start it, one loss curve. Everything is real; only the model is tiny."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from job_process import ROOT, JobRunner

from raydist.launch.local_head import LocalHead
from raydist.storage import open_store

STEPS = 8
ARGUMENTS = ("--num-steps", str(STEPS), "--checkpoint.every-steps", "4")


@pytest.mark.timeout(600)
def test_run_started_in_four_ways_has_one_loss_curve(jobs: JobRunner) -> None:
    curves = {}
    for launcher in ("ray", "submit", "torchrun", "deepspeed"):
        environment = {"DS_ACCELERATOR": "cpu"} if launcher == "deepspeed" else {}
        done = jobs.run("--name", launcher, *ARGUMENTS, launcher=launcher, env=environment)
        assert done.exit_code == 0, done
        assert f"finished {STEPS} steps" in done.stdout, done
        assert "Traceback" not in done.stdout + done.stderr, done
        curves[launcher] = jobs.losses(launcher)
    assert sorted(curves["ray"]) == list(range(1, STEPS + 1))
    for launcher, curve in curves.items():
        assert curve == curves["ray"], launcher


@pytest.mark.timeout(300)
def test_run_on_a_running_cluster_joins_it_and_leaves_it_running(jobs: JobRunner) -> None:
    with LocalHead(cwd=str(ROOT)) as head:
        environment = head.environment | {"RAY_ADDRESS": head.address}
        done = jobs.run("--name", "joined", *ARGUMENTS, env=environment)
        assert done.exit_code == 0, done
        # Plain `ray job submit`, as the README has it, packages the directory.
        submitted = subprocess.run(
            [
                sys.executable, "-m", "ray.scripts.scripts", "job", "submit",
                "--address", head.job_address, "--working-dir", ".",
                "--runtime-env-json", json.dumps({"excludes": [".git", ".venv", "runs"]}), "--",
                *jobs.command("--name", "packaged", *ARGUMENTS, launcher="ray"),
            ],
            cwd=ROOT, env=head.environment, capture_output=True, text=True, timeout=240,
            check=False,
        )  # fmt: skip
        assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    assert jobs.losses("packaged") == jobs.losses("joined")
    assert not os.path.exists(head.folder)


@pytest.mark.timeout(300)
def test_run_says_little_and_keeps_the_rest_in_its_log(jobs: JobRunner) -> None:
    done = jobs.run("--name", "quiet", *ARGUMENTS)
    assert done.exit_code == 0, done
    assert not done.stderr.strip(), done
    for noise in ("Warning", "RayTrainWorker", "autoscaler", "INFO", "DeepSpeed"):
        assert noise not in done.stdout, done
    store = open_store(str(jobs.storage / "quiet"))
    keys = [key for key, _ in store.list("")]
    assert any(key.startswith("logs/driver-") for key in keys)
    assert {"run.json", "metrics/attempt-0001.jsonl", "metrics/loss.html"} <= set(keys)
    assert "report/attempt-0001.json" in keys
