# SPDX-License-Identifier: Apache-2.0
"""The doctor's verdict on healthy clusters and on broken ones: no false alarm, none missed.

Real: nodes, links, limits, file systems, Ray, gloo. Each fault is made on the node and undone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from doctors import examine
from node_jobs import NodeJobs

from raydist.testing.local_cluster import LocalCluster
from raydist.testing.local_node import LocalNode

pytestmark = pytest.mark.timeout(180)
ClusterMaker = Callable[..., LocalCluster]

_OTHER_TORCH = """
import pathlib, sys, torch
real, copy = pathlib.Path(torch.__file__).parent, pathlib.Path(sys.argv[1], "torch")
copy.mkdir(parents=True)
for path in real.iterdir():
    if path.name == "version.py":
        (copy / path.name).write_text(path.read_text().replace(torch.__version__, "2.9.1"))
    else:
        (copy / path.name).symlink_to(path)
"""


def _host(cluster: LocalCluster, number: int) -> str:
    return cluster.node(number).plan.host


@contextmanager
def _inside(cluster: LocalCluster, number: int, act: str, undo: str) -> Iterator[None]:
    """Run a shell command on a node, and another when the test is over."""

    def run(command: str) -> None:
        done = cluster.node(number).run(["sh", "-c", command])
        assert done.returncode == 0, done.stderr

    run(act)
    try:
        yield
    finally:
        run(undo)


def test_healthy_cluster_is_fit_with_nothing_to_say(cluster3: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    found = examine(cluster3, "--storage", str(tmp_path), "--read", f"{tmp_path}/tokenizer.json")
    assert found.exit_code == 0, found
    # Rates and load are of a machine that others use at the same time; nothing else is to be said.
    assert {f["check"] for f in found.report["findings"]} <= {"load", "storage", "network"}
    assert not found.findings("failure")
    assert len(found.report["nodes"]) == 3
    assert all(n["storage"]["upload_bytes_per_s"] > 0 for n in found.report["nodes"])
    ranks = found.report["collectives"]
    assert [rank["rank"] for rank in ranks] == [0, 1, 2]
    assert all(check["is_right"] for rank in ranks for check in rank["checks"])
    assert all(rank["all_reduce"]["bus_bytes_per_s"] > 0 for rank in ranks)
    assert len(found.report["links"]) == 3
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".json"]


def test_healthy_clusters_of_other_kinds_raise_no_alarm(make_cluster: ClusterMaker) -> None:
    cluster = make_cluster(3, ip_version=6, head_cpus=0, host_names={2: "loopback", 3: "nothing"})
    found = examine(cluster)
    assert found.exit_code == 0, found
    assert not found.findings("failure")
    assert {n["node"] for n in found.report["nodes"]} == {_host(cluster, 2), _host(cluster, 3)}


@pytest.mark.parametrize("has_carrier", [True, False])
def test_cut_data_link_makes_its_node_unfit(cluster3: LocalCluster, has_carrier: bool) -> None:
    cluster3.cut_link(3, network="data", has_carrier=has_carrier)
    found = examine(cluster3)
    assert found.exit_code == 1, found
    assert found.about("network")["where"] == [_host(cluster3, 3)]
    # Without it the others are fit.
    assert examine(cluster3, "--exclude", _host(cluster3, 3)).exit_code == 0


@pytest.mark.parametrize("rate_mbps", [400, 20])  # faster and slower than the other network
def test_slow_link_is_named(cluster3: LocalCluster, rate_mbps: int) -> None:
    cluster3.slow_link(2, rate_mbps=rate_mbps, network="data")
    found = examine(cluster3)
    slow = [f for f in found.findings("warning") if f["check"] == "network"]
    assert slow, found
    assert _host(cluster3, 2) in {node for f in slow for node in f["where"]}
    assert not found.findings("failure")


def test_storage_that_nodes_do_not_share_is_a_failure(cluster3: LocalCluster) -> None:
    found = examine(cluster3, "--storage", "/dev/shm/runs", "--no-collectives")
    assert found.exit_code == 1, found
    assert len([f for f in found.findings("failure") if f["check"] == "storage"]) == 3
    assert "do not share" in found.findings("failure")[0]["what"]


def test_storage_that_one_node_cannot_write_is_named(cluster3: LocalCluster) -> None:
    with _inside(cluster3, 2, "touch /dev/shm/taken", "rm /dev/shm/taken"):
        found = examine(cluster3, "--storage", "/dev/shm/taken/runs", "--no-collectives")
    assert found.exit_code == 1, found
    failing = [f for f in found.findings("failure") if f["what"].startswith("Step")]
    assert [f["where"] for f in failing] == [[_host(cluster3, 2)]]


def test_file_that_one_node_lacks_is_named(cluster3: LocalCluster) -> None:
    path = "/dev/shm/tokenizer.json"
    with (
        _inside(cluster3, 1, f"echo '{{}}' > {path}", f"rm {path}"),
        _inside(cluster3, 2, f"echo '{{}}' > {path}", f"rm {path}"),
    ):
        found = examine(cluster3, "--read", path, "--no-collectives")
    assert found.exit_code == 1, found
    assert found.about("readable")["where"] == [_host(cluster3, 3)]


def test_small_shared_memory_is_named(cluster3: LocalCluster) -> None:
    small = "mount -t tmpfs -o size=32m tmpfs /dev/shm"
    with _inside(cluster3, 3, small, "umount /dev/shm"):
        found = examine(cluster3, "--no-collectives")
    warning = found.about("/dev/shm")
    assert warning["where"] == [_host(cluster3, 3)]


def test_low_limit_of_open_files_is_named(make_cluster: ClusterMaker) -> None:
    cluster = make_cluster(1)  # A limit once lowered cannot be raised again.
    (raylet,) = _raylets(cluster, 1)
    with _inside(cluster, 1, f"prlimit --pid {raylet} --nofile=4096:4096", "true"):
        found = examine(cluster, "--no-collectives")
    warning = found.about("open files")
    assert warning["where"] == [_host(cluster, 1)]
    assert "4096" in warning["what"]


def test_frozen_node_is_named_and_not_waited_for(cluster3: LocalCluster) -> None:
    pids = cluster3.node(3).processes()
    for pid in pids:
        cluster3.stop_process(3, pid)
    try:
        found = examine(cluster3)
    finally:
        for pid in pids:
            cluster3.continue_process(3, pid)
    assert found.exit_code == 1, found
    assert found.about("node")["where"] == [_host(cluster3, 3)]


def test_variable_left_behind_on_one_node_is_a_failure(make_cluster: ClusterMaker) -> None:
    cluster = make_cluster(2, node_environment={2: {"GLOO_SOCKET_IFNAME": "ens5"}})
    found = examine(cluster)
    assert found.exit_code == 1, found
    finding = found.about("network")
    assert finding["where"] == [_host(cluster, 2)]
    assert "GLOO_SOCKET_IFNAME" in finding["what"]
    assert "ens5" in finding["what"]


def test_node_with_another_torch_is_a_failure_and_a_run_refuses_it(
    make_cluster: ClusterMaker, jobs_on: Callable[[LocalNode], NodeJobs], tmp_path: Path
) -> None:
    copied = tmp_path / "site"
    lock = tmp_path / "extensions" / "shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (0, 0))  # no builder is that old
    cluster = make_cluster(
        2,
        node_environment={
            2: {"PYTHONPATH": str(copied), "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
        },
    )
    made = cluster.node(1).run([sys.executable, "-c", _OTHER_TORCH, str(copied)])
    assert made.returncode == 0, made.stderr
    found = examine(cluster, "--no-collectives")
    assert found.exit_code == 1, found
    (failure,) = found.findings("failure")
    assert "torch" in failure["what"]
    assert "2.9.1" in failure["what"]
    assert _host(cluster, 2) in failure["where"]
    assert str(lock) in found.about("compiled ops")["what"]
    run = jobs_on(cluster.node(1)).run(
        "--batch.global-batch-size", "12", "--scaling.nodes", "2", "--scaling.workers", "2"
    )
    assert run.exit_code == 2, run
    assert "Not fit to train: torch" in run.stderr
    assert _host(cluster, 2) in run.stderr
    assert "--scaling.no-preflight" in run.stderr


def _raylets(cluster: LocalCluster, number: int) -> list[int]:
    found = []
    for pid in cluster.node(number).processes():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        if command.endswith(b"/raylet"):
            found.append(pid)
    return found
