# SPDX-License-Identifier: Apache-2.0
"""What nvidia-smi says, taken apart.

Faked: nvidia-smi, a script that answers as the real one does; there may be no GPU here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from raydist.doctor import nvidia
from raydist.doctor.facts import GpuPair
from raydist.doctor.nvidia import has_device, parse_gpus, parse_matrix, read_gpus

FIELDS = (
    "index", "uuid", "name", "memory.total", "memory.used", "driver_version", "compute_mode",
    "ecc.errors.uncorrected.volatile.total", "mig.mode.current", "clocks_event_reasons.active",
)  # fmt: skip
H200 = "0, GPU-aa, NVIDIA H200, 143771, 4, 570.86.15, Default, 0, Disabled, 0x0000000000000001"
GEFORCE = (
    "1, GPU-bb, NVIDIA GeForce RTX 4090, 24564, 23000, 570.86.15, [N/A], [N/A], [N/A], "
    "0x0000000000000044"
)
P2P = (
    " \t\x1b[4mGPU0\tGPU1\tGPU2\t\x1b[0m\n GPU0\tX\tOK\tCNS\t\n GPU1\tOK\tX\tOK\t\n"
    " GPU2\tCNS\tOK\tX\t\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n"
)
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-47\t0\t\tN/A\nGPU1\tNV18\t X \tSYS\t0-47\t0\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)


def test_gpus_of_two_models_are_read_field_by_field() -> None:
    (first, second), driver = parse_gpus(f"{H200}\n{GEFORCE}\n", FIELDS)
    assert driver == "570.86.15"
    assert (first.index, first.uuid, first.name) == (0, "GPU-aa", "NVIDIA H200")
    assert first.memory_total_bytes == 143771 << 20
    assert first.memory_used_bytes == 4 << 20
    assert first.num_uncorrected_errors == 0
    assert first.compute_mode == "Default"
    assert first.slowdowns == ()
    assert not first.has_mig
    assert second.num_uncorrected_errors is None
    assert second.compute_mode is None
    assert second.slowdowns == ("hardware thermal limit",)


@pytest.mark.parametrize(
    ("mask", "slowdowns"),
    [
        ("0x0000000000000000", ()),
        ("0x0000000000000004", ()),
        ("0x0000000000000113", ()),
        ("0x0000000000000008", ("hardware slowdown",)),
        ("0x00000000000000e8", (
            "hardware slowdown", "driver's thermal limit", "hardware thermal limit", "power brake",
        )),
        ("[N/A]", ()),
    ],
)  # fmt: skip
def test_slowdowns_are_the_bits_that_a_healthy_busy_gpu_never_has(
    mask: str, slowdowns: tuple[str, ...]
) -> None:
    line = H200.replace("0x0000000000000001", mask)
    assert parse_gpus(line, FIELDS)[0][0].slowdowns == slowdowns


def test_lines_that_are_no_gpu_are_left_out() -> None:
    assert parse_gpus("WARNING: infoROM is corrupted at gpu 0000:3B:00.0\n", FIELDS) == ((), None)


def test_gpu_in_parts_has_no_number_for_used_memory() -> None:
    line = H200.replace(", 4, ", ", [N/A], ").replace("Disabled", "Enabled")
    (gpu,), _ = parse_gpus(line, FIELDS)
    assert gpu.has_mig
    assert gpu.memory_used_bytes == 0


def test_matrix_of_peer_access_gives_each_pair_once() -> None:
    assert parse_matrix(P2P) == {(0, 1): "OK", (0, 2): "CNS", (1, 2): "OK"}


def test_matrix_of_links_leaves_out_network_cards_and_affinities() -> None:
    assert parse_matrix(TOPOLOGY) == {(0, 1): "NV18"}


def test_matrix_of_something_else_is_empty() -> None:
    assert parse_matrix("") == parse_matrix("No devices were found\n") == {}


def _program(folder: Path, script: str) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_gpus_are_read_with_their_pairs(tmp_path: Path) -> None:
    (tmp_path / "query").write_text(f"{H200}\n{GEFORCE}\n")
    (tmp_path / "p2p").write_text(" \tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n")
    (tmp_path / "links").write_text(TOPOLOGY)
    script = (
        f'case "$*" in\n--query-gpu=*) cat {tmp_path}/query;;\n'
        f'"topo -p2p r") cat {tmp_path}/p2p;;\n"topo -m") cat {tmp_path}/links;;\nesac'
    )
    found = read_gpus(program=_program(tmp_path, script))
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-aa", "GPU-bb"]
    assert found.pairs == (GpuPair(first=0, second=1, peer_access="OK", link="NV18"),)
    assert (found.driver, found.problem) == ("570.86.15", "")


@pytest.mark.parametrize("unknown", ["clocks_event_reasons", "clocks_|ecc"], ids=["one", "all"])
def test_older_driver_is_asked_for_what_it_knows(tmp_path: Path, unknown: str) -> None:
    few = ", ".join(H200.split(", ")[:7])
    whole = H200.replace("0x0000000000000001", "0x0000000000000080")
    script = (
        f"if echo \"$*\" | grep -qE '{unknown}'; then echo Field is not a valid field; exit 2; fi\n"
        f"if echo \"$*\" | grep -q throttle; then echo '{whole}'; else echo '{few}'; fi"
    )
    found = read_gpus(program=_program(tmp_path, script))
    assert found.problem == ""
    assert [gpu.name for gpu in found.gpus] == ["NVIDIA H200"]
    expected = ("power brake",) if unknown == "clocks_event_reasons" else ()
    assert found.gpus[0].slowdowns == expected


@pytest.mark.parametrize(
    ("code", "has_card", "problem"),
    [
        (6, False, ""),
        (9, False, ""),
        (9, True, "nvidia-smi: has failed because it could not talk"),
        (15, False, "nvidia-smi: has failed because it could not talk"),
        (18, True, "nvidia-smi: has failed because it could not talk"),
    ],
)
def test_driver_that_fails_is_a_problem_where_there_is_a_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, has_card: bool, problem: str
) -> None:
    monkeypatch.setattr(nvidia, "has_device", lambda: has_card)
    script = f"echo 'has failed because it could not talk'; exit {code}"
    found = read_gpus(program=_program(tmp_path, script))
    assert found.gpus == ()
    assert found.problem == problem


def test_driver_that_hangs_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "_LIMIT_S", 0.2)
    found = read_gpus(program=_program(tmp_path, "exec sleep 60"))
    assert found.problem == "nvidia-smi: no answer in 0.2 s"


@pytest.mark.parametrize(
    ("vendor", "kind", "is_gpu"),
    [("0x10de", "0x030200", True), ("0x10de", "0x040300", False), ("0x1002", "0x030000", False)],
)
def test_device_is_a_gpu_by_vendor_and_class(
    tmp_path: Path, vendor: str, kind: str, is_gpu: bool
) -> None:
    device = tmp_path / "0000:01:00.0"
    device.mkdir()
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    assert has_device(tmp_path) == is_gpu


def test_machine_without_pci_has_no_device(tmp_path: Path) -> None:
    assert not has_device(tmp_path / "none")
