# SPDX-License-Identifier: Apache-2.0
"""The facts of this machine. Real: this machine; its control groups also as files in a folder."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from raydist.clock import SystemClock
from raydist.doctor import NodeFacts, examine
from raydist.doctor.control_group import GroupLimits, read_group_limits
from raydist.doctor.facts import OpFacts
from raydist.doctor.machine import (
    collect_node_facts,
    extensions_folder,
    read_folder,
    read_ops,
    torch_build,
)

GIB = 1 << 30


@pytest.fixture(scope="module")
def here() -> NodeFacts:
    return collect_node_facts(
        node="here",
        node_id="1",
        address="127.0.0.1",
        clock=SystemClock(),
        folders={"ray": "/tmp/ray"},
    )


def test_this_machine_is_described(here: NodeFacts) -> None:
    assert here.versions["python"] == ".".join(str(n) for n in sys.version_info[:3])
    assert {"raydist", "torch", "ray", "deepspeed", "transformers", "kernel"} <= set(here.versions)
    assert 0 < here.memory.available_bytes <= here.memory.total_bytes
    assert 0 < here.num_cpus <= (os.cpu_count() or 1)
    assert {folder.purpose for folder in here.folders} >= {"ray", "temporary"}
    assert all(0 < folder.free_bytes <= folder.total_bytes for folder in here.folders)
    assert here.limits.open_files_soft is None or here.limits.open_files_soft > 0


def test_this_machine_is_no_false_alarm(here: NodeFacts) -> None:
    assert [f for f in examine([here, here]) if f.severity == "failure"] == []


def test_facts_cross_a_process_and_become_json(here: NodeFacts) -> None:
    assert pickle.loads(pickle.dumps(here)) == here
    values = json.loads(json.dumps(here.to_json_dict()))
    assert values["memory"]["total_bytes"] == here.memory.total_bytes
    assert values["versions"] == here.versions


def test_facts_are_collected_without_torch_or_ray() -> None:
    script = (
        "import sys\nfrom raydist.clock import SystemClock\n"
        "from raydist.doctor.machine import collect_node_facts\n"
        "f = collect_node_facts(node='n', node_id='1', address='a', clock=SystemClock())\n"
        "assert f.versions['torch']\n"
        "print(sorted({'torch', 'ray', 'deepspeed', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "__version__ = '2.13.0+cu128'\ndebug = False\ncuda: Optional[str] = '12.8'\n"
            "hip: Optional[str] = None\n",
            {"torch": "2.13.0+cu128", "cuda": "12.8"},
        ),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", {"torch": "2.13.0+cpu"}),
        ("__version__ = '2.9.0'\ncuda = '12.8'\n", {"torch": "2.9.0", "cuda": "12.8"}),
        ("", {}),
    ],
)
def test_build_of_torch_is_read_from_its_source(text: str, expected: dict[str, str]) -> None:
    assert torch_build(text) == expected


def test_folder_that_is_not_there_is_described_by_the_nearest_above(tmp_path: Path) -> None:
    found = read_folder("storage", str(tmp_path / "not" / "yet"))
    above = read_folder("storage", str(tmp_path))
    assert found.path == str(tmp_path / "not" / "yet")
    assert (found.total_bytes, found.device) == (above.total_bytes, above.device)


def test_ops_are_found_with_their_locks_in_either_depth(tmp_path: Path) -> None:
    for op in ("deepspeed_shm_comm", "py311_cpu/cpu_adam"):
        (tmp_path / op).mkdir(parents=True)
        (tmp_path / op / "op.so").touch()
    half = tmp_path / "py311_cpu" / "utils"
    half.mkdir()
    (half / "lock").touch()
    os.utime(half / "lock", (1000.0, 1000.0))
    assert read_ops(tmp_path, now_unix_s=1600.0) == OpFacts(
        folder=str(tmp_path),
        built=("cpu_adam", "deepspeed_shm_comm"),
        locks=((str(half / "lock"), 600.0),),
    )


def test_ops_without_a_folder_are_none(tmp_path: Path) -> None:
    assert read_ops(tmp_path / "none", now_unix_s=0.0).built == ()


def test_extensions_folder_is_the_one_that_is_set(tmp_path: Path) -> None:
    assert extensions_folder({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == tmp_path
    beside = Path(sys.prefix, "torch_extensions")
    assert (extensions_folder({}) == beside) == os.access(sys.prefix, os.W_OK)


def _groups(folder: Path, membership: str, files: dict[str, str]) -> GroupLimits:
    for name, text in files.items():
        path = folder / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "membership").write_text(membership)
    return read_group_limits(root=folder / "root", membership=folder / "membership")


STAT = "anon 5\ninactive_file 1073741824\ntotal_inactive_file 2147483648\n"


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/pod/box\n", {"pod/box/memory.max": "max\n", "pod/box/cpu.max": "max 100000\n"},
         GroupLimits()),
        ("0::/pod/box\n",
         {"pod/box/memory.max": "max\n", "pod/memory.max": f"{16 * GIB}\n",
          "pod/memory.current": f"{5 * GIB}\n", "pod/memory.stat": STAT,
          "pod/box/cpu.max": "150000 100000\n", "pod/cpu.max": "400000 100000\n"},
         GroupLimits(memory_bytes=16 * GIB, memory_used_bytes=4 * GIB, num_cpus=1.5)),
        ("0::/not/visible/here\n",
         {"memory.max": f"{8 * GIB}\n", "memory.current": f"{GIB}\n", "memory.stat": STAT},
         GroupLimits(memory_bytes=8 * GIB, memory_used_bytes=0)),
        ("4:memory:/docker/x\n1:cpu,cpuacct:/docker/x\n0::/\n",
         {"memory/memory.limit_in_bytes": f"{4 * GIB}\n",
          "memory/memory.usage_in_bytes": f"{3 * GIB}\n", "memory/memory.stat": STAT,
          "cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"},
         GroupLimits(memory_bytes=4 * GIB, memory_used_bytes=GIB, num_cpus=0.5)),
        ("4:memory:/\n1:cpu:/\n",
         {"memory/memory.limit_in_bytes": "9223372036854771712\n",
          "cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
         GroupLimits()),
        ("", {}, GroupLimits()),
    ],
    ids=["v2_none", "v2_outer_is_tighter", "v2_container", "v1_container", "v1_none", "no_groups"],
)  # fmt: skip
def test_control_group_limits_in_both_versions(
    tmp_path: Path, membership: str, files: dict[str, str], expected: GroupLimits
) -> None:
    assert _groups(tmp_path, membership, files) == expected
