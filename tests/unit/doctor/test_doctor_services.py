# SPDX-License-Identifier: Apache-2.0
"""Findings about storage and collectives. Pure; nothing is faked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from doctor_nodes import healthy, node, one, told

from raydist.doctor import RankCollectives, StorageFacts, examine
from raydist.doctor.facts import CollectiveFacts

STORAGE = node().storage or StorageFacts(url="")


def _with(**changes: Any) -> list[Any]:
    return [*healthy(), node("odd", storage=replace(STORAGE, **changes))]


def test_storage_that_fails_on_one_node_is_a_failure_with_step_and_way_out() -> None:
    nodes = _with(failed_step="put", problem="AccessDenied, HTTP 403.", way_out="Allow it.")
    finding = one(nodes, "storage")
    assert (finding.severity, finding.where) == ("failure", ("odd",))
    assert finding.what == "Step 'put' fails at s3://bucket/runs: AccessDenied, HTTP 403."
    assert finding.what_to_do == "Allow it."


def test_storage_that_nodes_do_not_share_is_a_failure() -> None:
    finding = one(_with(unseen=("node-1", "node-2")), "storage")
    assert (finding.severity, finding.where) == ("failure", ("odd",))
    assert "node-1 and node-2 wrote: the nodes do not share it" in finding.what


@pytest.mark.parametrize("way", ["upload", "download"])
@pytest.mark.parametrize(
    ("others", "rate", "is_told"),
    [
        (90e6, 45e6, False),
        (90e6, 44.9e6, True),
        (900e6, 100e6, False),
        (900e6, 99.9e6, True),
        (90e6, None, False),
    ],
)
def test_storage_that_is_slow_from_one_node_is_a_warning(
    way: str, others: float, rate: float | None, is_told: bool
) -> None:
    name = f"{way}_bytes_per_s"
    usual = [replace(n, storage=replace(STORAGE, **{name: others})) for n in healthy()]
    odd = node("odd", storage=replace(STORAGE, **{name: rate}))
    findings = told([*usual, odd], "storage")
    assert [(f.severity, f.where) for f in findings] == [("warning", ("odd",))] * is_told
    assert all(way in f.what for f in findings)


def test_storage_that_was_not_checked_is_no_finding() -> None:
    assert examine([*healthy(), node("odd", storage=None)]) == []


def _rank(rank: int, is_right: bool | None, **changes: Any) -> RankCollectives:
    check = CollectiveFacts(
        name="all-reduce SUM",
        dtype="bfloat16",
        num_elements=1000,
        is_right=is_right,
        detail="" if is_right else f"wrong on {rank}",
    )
    node_id = f"id-of-node-{rank // 2 + 1}"
    whole = RankCollectives(rank=rank, node_id=node_id, backend="nccl", checks=(check,))
    return replace(whole, **changes)


def test_collectives_that_are_right_or_not_offered_are_no_finding() -> None:
    ranks = [_rank(0, True), _rank(1, None), _rank(2, True)]
    assert examine(healthy(), ranks=ranks) == []


def test_collective_that_is_wrong_names_ranks_and_nodes() -> None:
    ranks = [_rank(n, n not in (3, 4)) for n in range(6)]
    finding = one(healthy(), "collectives", ranks=ranks)
    assert (finding.severity, finding.where) == ("failure", ("node-2", "node-3"))
    assert finding.what == (
        "all-reduce SUM of 1000 bfloat16 elements over nccl is wrong on ranks 3, 4; rank 3: "
        "wrong on 3"
    )


def test_collective_that_is_wrong_on_many_ranks_is_cut_short() -> None:
    ranks = [_rank(n, False) for n in range(20)]
    assert (
        "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
        in one(healthy(10), "collectives", ranks=ranks).what
    )


def test_checks_that_were_left_out_are_noted_once() -> None:
    ranks = [_rank(n, True, num_skipped=4) for n in range(4)]
    finding = one(healthy(), "collectives", ranks=ranks)
    assert finding.severity == "note"
    assert finding.what.startswith("4 checks")


def test_node_that_does_not_answer_is_a_failure() -> None:
    finding = one(healthy(), "node", silent={"node-9": "no answer in 10 s."})
    assert (finding.severity, finding.where) == ("failure", ("node-9",))
    assert "--exclude node-9" in finding.what_to_do
