# SPDX-License-Identifier: Apache-2.0
"""Findings about hosts, each at its threshold and beside it. Pure; nothing is faked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from doctor_nodes import GIB, MIB, cpu_node, healthy, node, one, told

from raydist.doctor import NodeFacts, examine
from raydist.doctor.facts import ClockOffset, FolderFacts, LimitFacts, MemoryFacts

MEMORY = node().memory
LIMITS = node().limits


def _expect(odd: NodeFacts, check: str, severity: str | None) -> str:
    """Check what is told of ``odd`` among healthy nodes; returns the sentence."""
    if severity is None:
        assert examine([*healthy(), odd]) == []
        return ""
    finding = one([*healthy(), odd], check)
    assert (finding.severity, finding.where) == (severity, (odd.node,))
    return finding.what


@pytest.mark.parametrize(
    ("total", "limit", "available", "severity"),
    [
        (100 * GIB, None, 10 * GIB, None),
        (100 * GIB, None, 10 * GIB - 1, "warning"),
        (8 * GIB, None, 2 * GIB, None),
        (8 * GIB, None, 2 * GIB - 1, "warning"),
        (100 * GIB, 30 * GIB, 3 * GIB, None),
        (100 * GIB, 30 * GIB, 3 * GIB - 1, "warning"),
    ],
)
def test_memory_that_is_nearly_used_up_is_a_warning(
    total: int, limit: int | None, available: int, severity: str | None
) -> None:
    memory = replace(MEMORY, total_bytes=total, limit_bytes=limit, available_bytes=available)
    what = _expect(node("odd", memory=memory), "host memory", severity)
    assert ("control group" in what) == (severity is not None and limit is not None)


@pytest.mark.parametrize(
    ("total", "free", "severity"),
    [
        (GIB, GIB, None),
        (GIB, GIB - 1, "warning"),
        (65 * MIB, 65 * MIB, "warning"),
        (64 * MIB, 64 * MIB, "failure"),
        (256 * GIB, 64 * MIB - 1, "failure"),
        (256 * GIB, 64 * MIB, "warning"),
        (None, None, None),
    ],
)
def test_shared_memory_that_is_short_fails_as_small_as_a_container_has_it(
    total: int | None, free: int | None, severity: str | None
) -> None:
    memory = replace(MEMORY, shm_total_bytes=total, shm_free_bytes=free)
    _expect(node("odd", memory=memory), "/dev/shm", severity)


def test_shared_memory_of_a_container_is_a_warning_without_gpus() -> None:
    memory = replace(MEMORY, shm_total_bytes=64 * MIB, shm_free_bytes=64 * MIB)
    nodes = [cpu_node("a"), cpu_node("b", memory=memory)]
    assert one(nodes, "/dev/shm").severity == "warning"


@pytest.mark.parametrize(
    ("purpose", "total", "free", "severity"),
    [
        ("ray", 1000 * GIB, 100 * GIB, None),
        ("ray", 1000 * GIB, 100 * GIB - 1, "warning"),
        ("ray", 1000 * GIB, 50 * GIB, "warning"),
        ("ray", 1000 * GIB, 50 * GIB - 1, "failure"),
        ("ray", 20 * GIB, 10 * GIB, None),
        ("ray", 20 * GIB, 10 * GIB - 1, "warning"),
        ("home", 1000 * GIB, GIB, None),
        ("home", 1000 * GIB, GIB - 1, "warning"),
        ("temporary", 4 * GIB, GIB, None),
    ],
)
def test_disk_below_rays_folder_fails_where_ray_refuses(
    purpose: str, total: int, free: int, severity: str | None
) -> None:
    folder = FolderFacts(purpose=purpose, path="/data", total_bytes=total, free_bytes=free)  # type: ignore[arg-type]
    _expect(node("odd", folders=(folder,)), "disk", severity)


def test_disk_with_several_folders_is_told_once_and_as_rays() -> None:
    folders = tuple(
        FolderFacts(purpose=p, path=f"/{p}", total_bytes=100 * GIB, free_bytes=GIB // 2, device=7)
        for p in ("temporary", "home", "ray")
    )  # fmt: skip
    assert "/ray (ray) has 0.5 GiB free" in _expect(node("odd", folders=folders), "disk", "failure")


@pytest.mark.parametrize(
    ("soft", "hard", "severity"),
    [
        (1024, 8192, None),
        (1024, 8191, "warning"),
        (1024, 1024, "warning"),
        (256, 1023, "failure"),
        (20000, 20000, None),
        (256, None, None),
        (None, None, None),
    ],
)
def test_open_files_count_as_far_as_ray_raises_them(
    soft: int | None, hard: int | None, severity: str | None
) -> None:
    limits = replace(LIMITS, open_files_soft=soft, open_files_hard=hard)
    _expect(node("odd", limits=limits), "open files", severity)


@pytest.mark.parametrize(
    ("locked", "can_lock_all", "devices", "severity"),
    [
        (8 * MIB, False, ("mlx5_0",), "failure"),
        (8 * MIB, True, ("mlx5_0",), None),
        (None, False, ("mlx5_0",), None),
        (512 * GIB, False, ("mlx5_0",), None),
        (512 * GIB - 1, False, ("mlx5_0",), "failure"),
        (8 * MIB, False, (), "note"),
        (8 * MIB, True, (), None),
    ],
)
def test_locked_memory_matters_where_rdma_is(
    locked: int | None, can_lock_all: bool, devices: tuple[str, ...], severity: str | None
) -> None:
    limits = replace(LIMITS, locked_memory_bytes=locked, can_lock_all=can_lock_all)
    _expect(node("odd", limits=limits, rdma_devices=devices), "locked memory", severity)


@pytest.mark.parametrize(("load", "severity"), [(128.0, None), (128.1, "note")])
def test_load_that_is_not_ours_is_noted(load: float, severity: str | None) -> None:
    _expect(node("odd", load_1min=load), "load", severity)


@pytest.mark.parametrize(
    ("offset_s", "round_trip_s", "severity"),
    [
        (1.0, 0.0, None),
        (1.1, 0.0, "warning"),
        (-1.1, 0.0, "warning"),
        (1.1, 0.4, None),
        (60.0, 0.0, "warning"),
        (60.1, 0.0, "failure"),
        (-3600.0, 0.01, "failure"),
        (60.1, 0.4, "warning"),
    ],
)
def test_clock_is_told_when_it_is_off_by_more_than_the_measurement(
    offset_s: float, round_trip_s: float, severity: str | None
) -> None:
    clock = ClockOffset(offset_s=offset_s, round_trip_s=round_trip_s)
    nodes = [replace(n, clock=ClockOffset(offset_s=0.0, round_trip_s=0.001)) for n in healthy()]
    findings = told([*nodes, node("odd", clock=clock)], "clock")
    expected = [] if severity is None else [(severity, ("odd",))]
    assert [(f.severity, f.where) for f in findings] == expected
    assert all(("ahead of" if offset_s > 0 else "behind") in f.what for f in findings)


def test_clock_of_the_asker_is_not_held_against_the_nodes() -> None:
    clock = ClockOffset(offset_s=-500.0, round_trip_s=0.001)
    assert examine([replace(n, clock=clock) for n in healthy()]) == []


def test_clock_of_one_of_two_nodes_is_compared_with_the_asker() -> None:
    clock = ClockOffset(offset_s=90.0, round_trip_s=0.001)
    finding = one([*healthy(1), node("odd", clock=clock)], "clock")
    assert finding.where == ("odd",)
    assert "90.0 s ahead of the machine that asked" in finding.what
    assert "RequestTimeTooSkewed" in finding.why


def test_ordinary_container_has_notes_only() -> None:
    container = cpu_node(
        memory=MemoryFacts(
            total_bytes=64 * GIB,
            limit_bytes=16 * GIB,
            available_bytes=14 * GIB,
            shm_total_bytes=8 * GIB,
            shm_free_bytes=8 * GIB,
        ),
        limits=LimitFacts(
            open_files_soft=1 << 20,
            open_files_hard=1 << 20,
            locked_memory_bytes=8 * MIB,
            processes=None,
        ),
        num_cpus=4.0,
    )
    twins = [replace(container, node=f"pod-{n}", node_id=str(n)) for n in range(3)]
    assert {(f.severity, f.check) for f in examine(twins)} == {("note", "locked memory")}
    assert examine(twins)[0].where == ("pod-0", "pod-1", "pod-2")
