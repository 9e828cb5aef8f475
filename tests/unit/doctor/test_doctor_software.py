# SPDX-License-Identifier: Apache-2.0
"""Findings about versions and compiled ops. Pure; nothing is faked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from doctor_nodes import VERSIONS, cpu_node, healthy, node, one, versions

from raydist.doctor import examine
from raydist.doctor.facts import OpFacts
from raydist.doctor.software import STALE_LOCK_S


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_nodes_that_are_alike_have_no_finding(count: int) -> None:
    assert examine(healthy(count)) == []


def test_head_node_without_gpus_and_cuda_is_noted_only() -> None:
    findings = examine([*healthy(), cpu_node()])
    assert {(f.severity, f.where) for f in findings} == {("note", ("head",))}
    assert {f.check for f in findings} == {"GPU count", "torch version"}


@pytest.mark.parametrize("name", ["ray", "torch", "deepspeed", "raydist", "transformers"])
def test_version_of_one_node_that_differs_is_a_failure_naming_both(name: str) -> None:
    odd = node("node-4", versions=versions(**{name: "9.9.9"}))
    finding = one([*healthy(), odd], f"{name} version")
    assert finding.severity == "failure"
    assert finding.where == ("node-4",)
    assert finding.what == (
        f"{name} is {VERSIONS[name].partition('+')[0]} on node-1, node-2 and node-3 and 9.9.9 on "
        "node-4. Most nodes, 3 of 4, agree."
    )


def test_version_that_two_nodes_disagree_on_is_told_of_both() -> None:
    odd = node("node-2", versions=versions(ray="2.59.0"))
    finding = one([*healthy(1), odd], "ray version")
    assert finding.where == ("node-1", "node-2")
    assert finding.what == "ray is 2.60.0 on node-1 and 2.59.0 on node-2."


def test_package_that_one_node_lacks_is_a_failure() -> None:
    less = {name: version for name, version in VERSIONS.items() if name != "deepspeed"}
    finding = one([*healthy(), node("node-4", versions=less)], "deepspeed version")
    assert (finding.severity, finding.where) == ("failure", ("node-4",))
    assert "none on node-4" in finding.what


def test_package_that_all_nodes_lack_is_no_finding() -> None:
    less = {name: version for name, version in VERSIONS.items() if name != "deepspeed"}
    assert examine([replace(n, versions=less) for n in healthy()]) == []


@pytest.mark.parametrize(
    ("version", "severity"), [("3.12.7", "failure"), ("3.10.7", "failure"), ("3.11.9", "note")]
)
def test_python_that_differs_fails_by_minor_version_only(version: str, severity: str) -> None:
    odd = node("node-4", versions=versions(python=version))
    finding = one([*healthy(), odd], "Python version")
    assert (finding.severity, finding.where) == (severity, ("node-4",))


@pytest.mark.parametrize(
    ("name", "severity", "check"),
    [
        ("numpy", "note", "numpy version"),
        ("kernel", "note", "kernel version"),
        ("libc", "note", "libc version"),
        ("machine", "warning", "machine version"),
        ("driver", "warning", "GPU driver"),
        ("nccl", "failure", "NCCL version"),
    ],
)
def test_system_that_differs_on_one_node_is_told_by_weight(
    name: str, severity: str, check: str
) -> None:
    odd = node("node-4", versions=versions(**{name: "600.0"}))
    finding = one([*healthy(), odd], check)
    assert (finding.severity, finding.where) == (severity, ("node-4",))


def test_build_of_torch_that_differs_between_gpu_nodes_is_a_failure() -> None:
    odd = node("node-4", versions=versions(torch="2.13.0+cpu"))
    finding = one([*healthy(), odd], "torch version")
    assert (finding.severity, finding.where) == ("failure", ("node-4",))


@pytest.mark.parametrize(
    ("driver", "cuda", "is_old"),
    [
        ("525.60.13", "12.8", False),
        ("525.59.9", "12.8", True),
        ("470.82.01", "12.1", True),
        ("470.82.01", "11.8", False),
        ("450.79.9", "11.8", True),
        ("580.65.06", "13.0", False),
        ("579.99", "13.0", True),
        ("300.1", "99.0", False),
    ],
)
def test_driver_older_than_torch_takes_is_a_warning(driver: str, cuda: str, is_old: bool) -> None:
    nodes = [replace(n, versions=versions(driver=driver, cuda=cuda)) for n in healthy(2)]
    findings = examine(nodes)
    expected = [("warning", "GPU driver", ("node-1", "node-2"))] if is_old else []
    assert [(f.severity, f.check, f.where) for f in findings] == expected
    assert all(driver in f.what for f in findings)


@pytest.mark.parametrize(
    ("age_s", "severity", "word"),
    [(STALE_LOCK_S, "note", "a lock"), (STALE_LOCK_S + 1, "warning", "a stale lock")],
)
def test_lock_of_a_build_is_stale_when_no_build_takes_that_long(
    age_s: float, severity: str, word: str
) -> None:
    ops = OpFacts(folder="/x", built=("deepspeed_shm_comm",), locks=(("/x/cpu_adam/lock", age_s),))
    finding = one([*healthy(), node("node-4", ops=ops)], "compiled ops")
    assert (finding.severity, finding.where) == (severity, ("node-4",))
    assert f"{word} at /x/cpu_adam/lock" in finding.what


def test_op_that_is_not_built_on_one_node_is_noted() -> None:
    finding = one([*healthy(), node("node-4", ops=OpFacts(folder="/x"))], "compiled ops")
    assert (finding.severity, finding.where) == ("note", ("node-4",))
    assert "built on 3 of 4 nodes" in finding.what


def test_op_that_is_built_nowhere_is_no_finding() -> None:
    assert examine([replace(n, ops=OpFacts(folder="/x")) for n in healthy()]) == []
