# SPDX-License-Identifier: Apache-2.0
"""`raydist doctor` on a local cluster, and its report."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from job_process import ROOT

from raydist.testing.local_cluster import LocalCluster


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """A doctor's report as JSON and its exit status."""

    exit_code: int
    report: Mapping[str, Any]

    def findings(self, severity: str) -> list[dict[str, Any]]:
        return [f for f in self.report["findings"] if f["severity"] == severity]

    def about(self, check: str) -> dict[str, Any]:
        """The gravest finding of a check that is not a note."""
        found = [
            f for f in self.report["findings"] if f["check"] == check and f["severity"] != "note"
        ]
        assert found, self.report["findings"]
        return found[0]


def examine(cluster: LocalCluster, *arguments: str, on: int = 1) -> Examination:
    """Run the doctor on a node."""
    done = cluster.node(on).run(
        [sys.executable, "-m", "raydist.cli.main", "doctor", "--json", *arguments],
        env={"OMP_NUM_THREADS": "1"}, cwd=ROOT, timeout_s=120,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    assert not done.stderr, done.stderr
    return Examination(exit_code=done.returncode, report=json.loads(done.stdout))
