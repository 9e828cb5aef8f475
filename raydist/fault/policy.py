# SPDX-License-Identifier: Apache-2.0
"""What to do after a worker group failed: a pure decision on what its ranks reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from raydist.errors import FailureKind

_FINAL = {
    FailureKind.INPUT,
    FailureKind.STORAGE,
    FailureKind.NUMERICS,
    FailureKind.FENCED,
    FailureKind.INTERRUPTED,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """How one rank ended.

    Fields:
        kind: WORKER_LOST when the rank itself is gone; else the kind of its error.
        error: Type of the exception, for comparing.
        step: Step it was in, None where that is not known.
        is_collateral: Whether it failed inside a collective, as ranks do whose peer is gone.
    """

    kind: FailureKind
    error: str
    step: int | None
    is_collateral: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Start the group again or end the run, and why, in words for the user."""

    action: Literal["restart", "stop"]
    reason: str


def decide(
    reports: Mapping[int, RankReport],
    *,
    world_size: int,
    previous: Mapping[int, RankReport] | None,
    failures: int,
    max_failures: int,
) -> Decision:
    """Decide on one failure of the group.

    An error of a final kind ends the run: another attempt would meet it again. So does an
    exception of the job's own code that every rank raised at one step, or that came back at
    the same step after a restart. All else is a lost rank and uses the budget.

    Args:
        reports: By rank, of the ranks that ended.
        world_size: Ranks of the group.
        previous: The reports of the failure before, if any.
        failures: Failures so far, this one included.
        max_failures: fault.max_worker_failures.
    """
    for rank, report in sorted(reports.items()):
        if report.kind in _FINAL:
            return Decision(action="stop", reason=f"rank {rank}: {report.error}")
    own = {r: report for r, report in reports.items() if _is_own_fault(report)}
    if own and len(own) == world_size and len(set(own.values())) == 1:
        return Decision(action="stop", reason="every rank raised the same error")
    if previous is not None and any(previous.get(r) == report for r, report in own.items()):
        return Decision(action="stop", reason="the same error came back at the same step")
    if previous == reports and len(reports) == world_size and not _has_lost(reports):
        return Decision(action="stop", reason="the group failed as it did before")
    lost = [r for r, report in sorted(reports.items()) if report.kind is FailureKind.WORKER_LOST]
    failed = min(own or reports, default=0)  # Collateral failures follow from the others.
    who = f"rank {lost[0]} was lost" if lost else f"rank {failed} failed"
    if failures > max_failures:
        return Decision(
            action="stop",
            reason=f"{who}, and {max_failures} restarts are spent (fault.max_worker_failures)",
        )
    return Decision(action="restart", reason=f"{who}; restart {failures} of {max_failures}")


def _has_lost(reports: Mapping[int, RankReport]) -> bool:
    return any(report.kind is FailureKind.WORKER_LOST for report in reports.values())


def _is_own_fault(report: RankReport) -> bool:
    return report.kind is FailureKind.USER_CODE and not report.is_collateral
