# SPDX-License-Identifier: Apache-2.0
"""Tiny jobs whose driver runs on a node of a local cluster. Storage is shared by all nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from job_process import DEFAULT_JOB, ROOT, JobProcess, JobRunner, Launcher

from raydist.testing.local_node import LocalNode


class NodeJobs(JobRunner):
    """Runs jobs on a node; Ray's workers belong to the cluster and end with it."""

    def __init__(self, folder: Path, node: LocalNode) -> None:
        super().__init__(folder)
        self._node = node

    def command(self, *arguments: str, job: Path = DEFAULT_JOB, launcher: Launcher) -> list[str]:
        inside = super().command(*arguments, job=job, launcher=launcher)
        return self._node.command(inside, cwd=ROOT)

    @contextmanager
    def started(
        self,
        *arguments: str,
        job: Path = DEFAULT_JOB,
        launcher: Launcher = "ray",
        env: Mapping[str, str] | None = None,
    ) -> Iterator[JobProcess]:
        environment = {**self._node.environment, **(env or {})}
        with super().started(*arguments, job=job, launcher=launcher, env=environment) as process:
            yield process
