# SPDX-License-Identifier: Apache-2.0
"""The doctor's report as text and JSON. Pure; nothing is faked."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from doctor_nodes import cpu_node, healthy, node, versions

from raydist.doctor import (
    UNFIT_EXIT_CODE,
    DoctorReport,
    RankCollectives,
    StorageFacts,
    examine,
    render,
)
from raydist.doctor.facts import AllReduceRate, CollectiveFacts
from raydist.doctor.finding import Finding, in_order
from raydist.errors import FailureKind


def _report(nodes: list[Any], **more: Any) -> DoctorReport:
    return DoctorReport(nodes=tuple(nodes), findings=tuple(examine(nodes)), **more)


def test_healthy_cluster_is_fit_in_text_json_and_exit_code() -> None:
    report = _report(healthy(), seconds=2.34)
    assert report.exit_code == 0
    assert report.to_json_dict()["is_fit"] is True
    lines = render(report).splitlines()
    assert lines[0].split() == [
        "node", "address", "GPUs", "CPUs", "memory", "/dev/shm", "clock", "storage", "up", "/",
        "down",
    ]  # fmt: skip
    assert lines[1].startswith("node-1")
    for cell in ("2 x NVIDIA H100 80GB HBM3", "512 GiB", "+0.002 s", "90 MB/s / 400 MB/s"):
        assert cell in lines[1]
    assert lines[-2:] == [
        "3 nodes in 2.3 s: 0 failures, 0 warnings, 0 notes", "fit to train: yes",
    ]  # fmt: skip


def test_unfit_cluster_names_the_nodes_and_ends_with_a_code_of_its_own() -> None:
    report = _report([*healthy(), node("node-4", versions=versions(ray="1.0"))])
    assert report.exit_code == UNFIT_EXIT_CODE
    assert UNFIT_EXIT_CODE not in {kind.exit_code for kind in FailureKind} | {0}
    text = render(report)
    assert text.splitlines()[-1] == "fit to train: no (node-4)"
    assert "FAILURE ray version on node-4\n  ray is 2.60.0 on node-1, node-2 and node-3" in text
    assert max(len(line) for line in text.splitlines()) <= 120


def test_warnings_and_notes_leave_the_cluster_fit() -> None:
    report = _report([*healthy(), cpu_node(load_1min=1000.0)])
    assert {finding.severity for finding in report.findings} == {"note"}
    assert report.is_fit


def test_report_without_a_node_is_not_fit() -> None:
    report = DoctorReport(nodes=(), findings=())
    assert report.exit_code == UNFIT_EXIT_CODE
    assert render(report).endswith("fit to train: no (no node answered)")


def test_report_shows_links_collectives_failing_storage_and_who_was_left_out() -> None:
    check = CollectiveFacts(name="barrier", dtype="float32", num_elements=0, is_right=True)
    absent = replace(check, name="all-reduce AVG", is_right=None)
    rank = RankCollectives(
        rank=0,
        node_id="x",
        backend="gloo",
        checks=(check, absent),
        all_reduce=AllReduceRate(num_bytes=16 << 20, bus_bytes_per_s=2e9, latency_s=25e-6),
    )
    storage = StorageFacts(url="s3://b", failed_step="put", problem="no")
    report = _report(
        [node("a", storage=storage), node("b", clock=None, storage=None)],
        rates={("a", "b"): 1.25e9, ("a", "c"): None},
        ranks=(rank,),
        excluded=("c",),
    )
    text = render(report)
    assert "a - b  1,250 MB/s" in text
    assert "a - c  no connection" in text
    assert "collectives over gloo on 1 rank: 1 of 1 right; all-reduce of 16 MiB at" in text
    assert "2,000 MB/s" in text
    assert "fails: put" in text
    assert "left out: c" in text
    values = json.loads(json.dumps(report.to_json_dict()))
    assert values["links"] == [
        {"nodes": ["a", "b"], "bytes_per_s": 1.25e9}, {"nodes": ["a", "c"], "bytes_per_s": None},
    ]  # fmt: skip
    assert values["excluded"] == ["c"]
    assert values["collectives"][0]["checks"][0]["name"] == "barrier"
    assert values["findings"][0]["check"] == "storage"


def test_two_ray_nodes_on_one_host_are_told_apart() -> None:
    twins = [replace(node("host"), node_id=f"{n}23456789abc") for n in (1, 2)]
    odd = replace(twins[1], versions=versions(ray="1.0"))
    findings = examine([twins[0], odd])
    assert findings[0].where == ("host (12345678)", "host (22345678)")


@pytest.mark.parametrize("severity", ["failure", "warning", "note"])
def test_what_is_said_of_several_nodes_is_said_once_in_order_of_weight(severity: str) -> None:
    def finding(where: str, **changes: Any) -> Finding:
        usual = Finding(
            severity=severity,  # type: ignore[arg-type]
            check="disk", where=(where,), what="full", why="so", what_to_do="empty it",
        )  # fmt: skip
        return replace(usual, **changes)

    others = [finding("z", severity=s, what="other") for s in ("note", "warning", "failure")]
    found = in_order([*others, finding("a"), finding("b"), finding("a")])
    assert [f.severity for f in found] == sorted(
        (f.severity for f in found), key=("failure", "warning", "note").index
    )
    assert [f.where for f in found if f.what == "full"] == [("a", "b")]
