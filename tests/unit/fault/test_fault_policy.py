# SPDX-License-Identifier: Apache-2.0
"""Restart or stop: the decision on what ranks reported. Nothing is faked."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from raydist.errors import FailureKind
from raydist.fault import Decision, RankReport, decide

_LOST = RankReport(kind=FailureKind.WORKER_LOST, error="RayActorError", step=None)
_PEER_GONE = RankReport(
    kind=FailureKind.USER_CODE, error="DistBackendError", step=7, is_collateral=True
)


def _own(step: int | None = 7, error: str = "KeyError") -> RankReport:
    return RankReport(kind=FailureKind.USER_CODE, error=error, step=step)


def _decide(
    reports: Mapping[int, RankReport],
    *,
    previous: Mapping[int, RankReport] | None = None,
    failures: int = 1,
    max_failures: int = 3,
    world_size: int = 4,
) -> Decision:
    return decide(
        reports,
        world_size=world_size,
        previous=previous,
        failures=failures,
        max_failures=max_failures,
    )


@pytest.mark.parametrize(
    "kind",
    [
        FailureKind.INPUT,
        FailureKind.STORAGE,
        FailureKind.NUMERICS,
        FailureKind.FENCED,
        FailureKind.INTERRUPTED,
    ],
)
def test_policy_final_kind_on_any_rank_stops_with_its_error(kind: FailureKind) -> None:
    final = RankReport(kind=kind, error="what it was", step=3)
    decision = _decide({0: _LOST, 1: _PEER_GONE, 2: final})
    assert decision == Decision(action="stop", reason="rank 2: what it was")


def test_policy_every_kind_is_final_or_restartable() -> None:
    actions = {
        kind: _decide({0: RankReport(kind=kind, error="e", step=1)}).action for kind in FailureKind
    }
    restartable = {kind for kind, action in actions.items() if action == "restart"}
    assert restartable == {FailureKind.USER_CODE, FailureKind.WORKER_LOST}


def test_policy_lost_rank_among_collateral_failures_restarts_and_is_named() -> None:
    decision = _decide({0: _PEER_GONE, 1: _PEER_GONE, 2: _LOST, 3: _PEER_GONE})
    assert decision == Decision(action="restart", reason="rank 2 was lost; restart 1 of 3")


def test_policy_own_fault_among_collateral_failures_is_the_one_named() -> None:
    decision = _decide({0: _PEER_GONE, 1: _PEER_GONE, 2: _own(), 3: _PEER_GONE})
    assert decision == Decision(action="restart", reason="rank 2 failed; restart 1 of 3")


@pytest.mark.parametrize(("failures", "action"), [(1, "restart"), (3, "restart"), (4, "stop")])
def test_policy_budget_allows_exactly_max_failures_restarts(failures: int, action: str) -> None:
    decision = _decide({1: _LOST}, failures=failures, max_failures=3)
    assert decision.action == action


def test_policy_budget_spent_says_so_by_its_key() -> None:
    decision = _decide({1: _LOST}, failures=4, max_failures=3)
    assert decision.reason == (
        "rank 1 was lost, and 3 restarts are spent (fault.max_worker_failures)"
    )


def test_policy_budget_of_zero_stops_at_the_first_failure() -> None:
    assert _decide({0: _LOST}, failures=1, max_failures=0).action == "stop"


def test_policy_same_error_on_every_rank_at_one_step_stops_at_once() -> None:
    decision = _decide(dict.fromkeys(range(4), _own()))
    assert decision == Decision(action="stop", reason="every rank raised the same error")


def test_policy_only_rank_of_a_run_raising_stops_at_once() -> None:
    assert _decide({0: _own()}, world_size=1).action == "stop"


@pytest.mark.parametrize(
    "reports",
    [
        {0: _own(), 1: _own(), 2: _own()},
        {0: _own(), 1: _own(), 2: _own(), 3: _own(step=8)},
        {0: _own(), 1: _own(), 2: _own(), 3: _own(error="OSError")},
        {0: _own(), 1: _own(), 2: _own(), 3: _LOST},
        dict.fromkeys(range(4), _PEER_GONE),
        dict.fromkeys(range(4), _LOST),
    ],
    ids=["not_all", "another_step", "another_error", "one_lost", "all_collateral", "all_lost"],
)
def test_policy_errors_that_are_not_all_alike_restart(reports: dict[int, RankReport]) -> None:
    assert _decide(reports).action == "restart"


def test_policy_error_back_at_the_same_step_of_the_same_rank_stops() -> None:
    decision = _decide({1: _own(), 2: _PEER_GONE}, previous={0: _PEER_GONE, 1: _own()}, failures=2)
    assert decision == Decision(action="stop", reason="the same error came back at the same step")


def test_policy_error_back_before_the_first_step_stops() -> None:
    reports = {1: _own(step=None)}
    assert _decide(reports, previous=dict(reports), failures=2).action == "stop"


@pytest.mark.parametrize(
    "previous",
    [
        {},
        {1: _own(step=6)},
        {1: _own(error="OSError")},
        {2: _own()},
        {1: _LOST},
    ],
    ids=["none", "another_step", "another_error", "another_rank", "was_lost"],
)
def test_policy_error_unlike_the_one_before_restarts(previous: dict[int, RankReport]) -> None:
    assert _decide({1: _own()}, previous=previous, failures=2).action == "restart"


@pytest.mark.parametrize("report", [_LOST, _PEER_GONE])
def test_policy_lost_rank_again_is_no_repeated_error(report: RankReport) -> None:
    assert _decide({1: report}, previous={1: report}, failures=2).action == "restart"


def test_policy_without_any_report_uses_the_budget() -> None:
    assert _decide({}).action == "restart"
    assert _decide({}, failures=4).action == "stop"


def test_policy_whole_group_failing_alike_twice_stops_even_where_a_peer_may_be_gone() -> None:
    reports = {0: _PEER_GONE, 1: _PEER_GONE}
    assert (
        decide(reports, world_size=2, previous=reports, failures=2, max_failures=9).action == "stop"
    )
