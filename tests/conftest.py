# SPDX-License-Identifier: Apache-2.0
"""Real jobs for integration and fault tests. Nothing is faked."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_process import JobRunner


@pytest.fixture
def jobs(tmp_path: Path) -> JobRunner:
    return JobRunner(tmp_path)


@pytest.fixture(scope="session")
def unfaulted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of 20 undisturbed steps, under torchrun: no launcher changes them."""
    runner = JobRunner(tmp_path_factory.mktemp("unfaulted"))
    arguments = ("--name", "unfaulted", "--num-steps", "20", "--checkpoint.every-steps", "5")
    done = runner.run(*arguments, launcher="torchrun")
    assert done.exit_code == 0, done
    return runner.losses("unfaulted")
