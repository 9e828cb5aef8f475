# SPDX-License-Identifier: Apache-2.0
"""A whole run on s3://, ended and resumed under Ray. Real: S3 (SeaweedFS), Ray, gloo."""

from __future__ import annotations

import json
import re

import pytest
from job_process import TOKENS_PER_STEP, JobRunner, run_ckpt

from raydist.metrics.history import merge, read_history
from raydist.storage import open_store
from raydist.testing.s3_server import S3Server


@pytest.mark.timeout(500)
def test_run_on_s3_is_resumed_as_if_it_had_not_ended(
    jobs: JobRunner,
    s3_server: S3Server,
    unfaulted: dict[int, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = s3_server.environment()
    storage = f"s3://{s3_server.bucket}/runs"
    arguments = (
        "--name", "on-s3", "--storage", storage, "--optimizer.decay-steps", "20",
        "--checkpoint.every-steps", "5",
    )  # fmt: skip
    first = jobs.run(*arguments, "--num-steps", "10", env=env)
    assert first.exit_code == 0, first
    assert "finished 10 steps" in first.stdout
    with jobs.started(*arguments, "--num-steps", "20", env=env) as process:
        second = process.wait(180)
        process.wait_until_gone(20)
    assert second.exit_code == 0, second
    assert "resuming run on-s3 at step 10 of 20" in second.stdout
    assert "finished 20 steps" in second.stdout
    assert s3_server.secret_access_key not in str(first) + str(second)
    assert not jobs.storage.exists()

    for name, value in env.items():
        monkeypatch.setenv(name, value)
    store = open_store(f"{storage}/on-s3")
    history = merge(read_history(store).rows)
    assert {row["step"]: row["loss"] for row in history.rows} == unfaulted
    assert [row["tokens_seen"] for row in history.rows] == [
        n * TOKENS_PER_STEP for n in range(1, 21)
    ]
    assert history.repeated_steps == []
    assert b"<html" in store.get("metrics/loss.html")[:500]
    logs = [key for key, _ in store.list("logs/")]
    assert len(logs) == 2
    assert s3_server.secret_access_key.encode() not in b"".join(store.get(key) for key in logs)

    listed = run_ckpt("ls", "--json", f"{storage}/on-s3", env=env)
    assert listed.exit_code == 0, listed
    assert [info["step"] for info in json.loads(listed.stdout)] == [20, 15, 10, 5]
    verified = run_ckpt("verify", f"{storage}/on-s3", env=env)
    assert verified.exit_code == 0, verified
    assert re.findall(r"step +(\d+) .* ok", verified.stdout) == ["20", "15", "10", "5"]
