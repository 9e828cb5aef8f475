# SPDX-License-Identifier: Apache-2.0
"""Findings about GPUs, each at its threshold and beside it. Pure; nothing is faked."""

from __future__ import annotations

from typing import Any

import pytest
from doctor_nodes import GIB, gpu, healthy, node, one, told

from raydist.doctor import examine
from raydist.doctor.facts import GpuPair


def _with(**changes: Any) -> list[Any]:
    """Three healthy nodes, and one whose second GPU is changed."""
    return [*healthy(), node("node-4", gpus=(gpu(0), gpu(1, **changes)))]


@pytest.mark.parametrize("count", [None, 0])
def test_gpu_without_uncorrected_errors_is_no_finding(count: int | None) -> None:
    assert examine(_with(num_uncorrected_errors=count)) == []


def test_gpu_with_an_uncorrected_error_is_a_failure() -> None:
    finding = one(_with(num_uncorrected_errors=1), "GPU memory errors")
    assert (finding.severity, finding.where) == ("failure", ("node-4",))
    assert "GPU 1 (GPU-1) has 1 uncorrected" in finding.what


def test_gpu_that_is_slowed_down_is_a_warning_with_every_reason() -> None:
    slow = ("hardware slowdown", "power brake")
    finding = one(_with(slowdowns=slow), "GPU clocks")
    assert (finding.severity, finding.where) == ("warning", ("node-4",))
    assert "hardware slowdown and power brake" in finding.what


@pytest.mark.parametrize(("used", "is_told"), [(4 * GIB, False), (4 * GIB + 1, True)])
def test_gpu_memory_in_use_is_told_above_5_percent(used: int, is_told: bool) -> None:
    findings = told(_with(memory_used_bytes=used), "GPU memory")
    assert [(f.severity, f.where) for f in findings] == [("warning", ("node-4",))] * is_told


def test_gpu_in_parts_is_not_called_in_use() -> None:
    assert examine(_with(memory_used_bytes=40 * GIB, has_mig=True)) == []


@pytest.mark.parametrize(
    ("mode", "is_told"),
    [("Default", False), ("Exclusive_Process", False), (None, False), ("Prohibited", True)],
)
def test_gpu_that_no_process_may_use_is_a_failure(mode: str | None, is_told: bool) -> None:
    findings = told(_with(compute_mode=mode), "GPU compute mode")
    assert [(f.severity, f.where) for f in findings] == [("failure", ("node-4",))] * is_told


def test_gpus_that_cannot_be_read_are_a_failure() -> None:
    ill = node("node-4", gpus=(), gpu_pairs=(), gpu_problem="nvidia-smi: no answer in 15 s")
    findings = examine([*healthy(), ill])
    assert [(f.severity, f.check) for f in findings] == [
        ("failure", "GPU driver"), ("note", "GPU count"),
    ]  # fmt: skip
    assert "no answer in 15 s" in findings[0].what


def test_gpu_that_is_missing_on_one_node_is_a_warning() -> None:
    finding = one([*healthy(), node("node-4", gpus=(gpu(0),), gpu_pairs=())], "GPU count")
    assert (finding.severity, finding.where) == ("warning", ("node-4",))
    assert finding.what == "1 GPUs here; other nodes have 2."


def test_gpus_of_two_models_are_a_warning_on_the_nodes_with_the_rarer_one() -> None:
    other = (gpu(0, name="NVIDIA A100"), gpu(1, name="NVIDIA A100"))
    finding = one([*healthy(), node("node-4", gpus=other)], "GPU model")
    assert (finding.severity, finding.where) == ("warning", ("node-4",))
    assert "NVIDIA A100 on node-4" in finding.what


@pytest.mark.parametrize(
    ("fraction", "is_told"), [(0.99, False), (0.9375, True)], ids=["alike", "with_ecc"]
)
def test_gpus_of_one_model_with_less_memory_are_a_warning(fraction: float, is_told: bool) -> None:
    findings = told(_with(memory_total_bytes=int(80 * GIB * fraction)), "GPU memory")
    assert [(f.severity, f.where) for f in findings] == [("warning", ("node-4",))] * is_told


@pytest.mark.parametrize(
    ("elsewhere", "severity"), [("OK", "warning"), ("CNS", "note")], ids=["here_only", "everywhere"]
)
def test_peer_access_that_is_missing_warns_where_the_model_has_it(
    elsewhere: str, severity: str
) -> None:
    def pairs(word: str) -> tuple[GpuPair, ...]:
        return (GpuPair(first=0, second=1, peer_access=word, link="PHB"),)

    nodes = [node(f"node-{n}", gpu_pairs=pairs(elsewhere)) for n in (1, 2)]
    findings = told([*nodes, node("node-3", gpu_pairs=pairs("CNS"))], "GPU peer access")
    assert [f.severity for f in findings] == [severity]
    assert "node-3" in findings[0].where
    assert ("node-1" in findings[0].where) == (elsewhere != "OK")


def test_nvlink_that_only_one_node_lacks_is_a_warning() -> None:
    pairs = (GpuPair(first=0, second=1, peer_access="OK", link="SYS"),)
    finding = one([*healthy(), node("node-4", gpu_pairs=pairs)], "NVLink")
    assert (finding.severity, finding.where) == ("warning", ("node-4",))
    assert "GPU 0 and 1 (SYS)" in finding.what


def test_nvlink_that_no_node_has_is_no_finding() -> None:
    pairs = (GpuPair(first=0, second=1, peer_access="OK", link="SYS"),)
    assert examine([node(f"node-{n}", gpu_pairs=pairs) for n in (1, 2, 3)]) == []


def test_pairs_of_which_nothing_is_known_are_no_finding() -> None:
    pairs = (GpuPair(first=0, second=1),)
    assert examine([*healthy(), node("node-4", gpu_pairs=pairs)]) == []
