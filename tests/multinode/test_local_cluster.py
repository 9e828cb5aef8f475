# SPDX-License-Identifier: Apache-2.0
"""The multi-node test bed does what it says. Real: namespaces, bridges, Ray, signals."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from node_jobs import NodeJobs

from raydist.errors import ClusterError
from raydist.testing.bed_ownership import choose_folder, sweep_leftovers
from raydist.testing.bed_plan import Network, bed_name, owner_of, ranks_in
from raydist.testing.local_cluster import LocalCluster
from raydist.testing.local_node import LocalNode
from raydist.testing.network_namespaces import list_namespaces, list_processes

_LISTEN = """
import socket, sys, time
address = sys.argv[1]
family = socket.AF_INET6 if ":" in address else socket.AF_INET
with socket.create_server((address, 0), family=family) as server:
    print(server.getsockname()[1], flush=True)
    peer, _ = server.accept()
    received, begun = 0, time.monotonic()
    while part := peer.recv(1 << 20):
        received += len(part)
    print(received, time.monotonic() - begun, flush=True)
"""
_SEND = """
import socket, sys
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with socket.create_connection((host, port), 1) as peer:
    peer.settimeout(30)
    peer.sendall(bytes(count))
"""
_RAY_NODES = """
import json, ray
ray.init(logging_level="ERROR", log_to_driver=False)
print(json.dumps([n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]]))
"""
_MARK = """
touch /dev/shm/$1-shm $TMPDIR/$1-tmp $RAY_TMPDIR/ray/$1-ray
hostname; ls /sys/class/net; ls /dev/shm $TMPDIR $RAY_TMPDIR/ray | grep n[0-9]-
"""
_START = """
import sys
from raydist.testing.local_cluster import LocalCluster
with LocalCluster(int(sys.argv[1])) as cluster:
    print("up", flush=True)
    input()
"""


def _send(sender: LocalNode, receiver: LocalNode, host: str, count: int, address: str) -> float:
    """Send bytes to a listener at ``address``, by ``host``; returns bytes/s as it saw them.

    Raises:
        ConnectionError: They did not arrive.
    """
    listener = receiver.popen(
        [sys.executable, "-S", "-c", _LISTEN, address], stdout=subprocess.PIPE, text=True
    )
    try:
        port = listener.stdout.readline().strip()
        sent = sender.run([sys.executable, "-S", "-c", _SEND, host, port, str(count)])
        if sent.returncode != 0:
            raise ConnectionError(sent.stderr)
        received, seconds = listener.stdout.readline().split()
        assert int(received) == count
        return count / float(seconds)
    finally:
        listener.kill()
        listener.communicate()


def _rate(cluster: LocalCluster, a: int, b: int, network: Network, count: int = 4 << 20) -> float:
    link = cluster.node(b).plan.find_link(network)
    assert link is not None
    return _send(cluster.node(a), cluster.node(b), link.address, count, link.address)


def _ray_addresses(cluster: LocalCluster) -> list[str]:
    done = cluster.node(1).run([sys.executable, "-c", _RAY_NODES])
    assert done.returncode == 0, done.stderr
    return sorted(json.loads(done.stdout.splitlines()[-1]))


def _wait_until(is_so: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := is_so()):
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.02)
    return value


def _runs(pid: int) -> bool:
    """Whether it has not ended; its status may still wait for the machine's first process."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _assert_nothing_left(bed: str, folder: Path, pids: list[int]) -> None:
    assert not [name for name in list_namespaces() if name.startswith(bed)]
    assert not folder.exists()
    assert not [pid for pid in pids if _runs(pid)]
    assert bed not in Path("/proc/mounts").read_text()


def test_nodes_reach_each_other_over_both_networks_and_by_name(cluster3: LocalCluster) -> None:
    nodes = cluster3.nodes
    for a, b in [(0, 1), (1, 2), (2, 0)]:
        address = nodes[b].plan.address
        _send(nodes[a], nodes[b], nodes[b].plan.host, 1000, address)
        before = cluster3.bytes_on(b + 1, "data")
        _rate(cluster3, a + 1, b + 1, "data", count=100_000)
        received = cluster3.bytes_on(b + 1, "data")[0] - before[0]
        assert 100_000 <= received < 200_000


def test_nodes_have_interfaces_host_names_and_directories_of_their_own(
    cluster3: LocalCluster,
) -> None:
    shown = []
    for node in cluster3.nodes:
        name = f"n{node.plan.number}"
        done = node.run(["sh", "-c", _MARK, "sh", name])
        assert done.returncode == 0, done.stderr
        shown.append(set(done.stdout.split()))
        assert node.plan.host in shown[-1]
        assert {link.interface for link in node.plan.links} < shown[-1]
        assert {f"{name}-shm", f"{name}-tmp", f"{name}-ray"} < shown[-1]
    # Nothing but loopback is on two nodes.
    for a, b in itertools.combinations(shown, 2):
        assert a & b == {"lo"}
    assert not list(Path("/dev/shm").glob("n[123]-shm"))


def test_management_network_is_really_slower(cluster3: LocalCluster) -> None:
    assert _rate(cluster3, 2, 3, "data") > 3 * _rate(cluster3, 2, 3, "management")


@pytest.mark.parametrize("has_carrier", [False, True])
def test_cut_data_link_leaves_management_working_and_heals(
    cluster3: LocalCluster, has_carrier: bool
) -> None:
    cluster3.cut_link(2, network="data", has_carrier=has_carrier)
    link = cluster3.node(2).plan.find_link("data")
    assert link is not None
    carrier = cluster3.node(2).run(["cat", f"/sys/class/net/{link.interface}/carrier"]).stdout
    assert carrier.strip() == str(int(has_carrier))
    for a, b in [(1, 2), (2, 1)]:
        with pytest.raises(ConnectionError, match=r"timed out|unreachable|No route"):
            _rate(cluster3, a, b, "data", count=1000)
    _rate(cluster3, 1, 2, "management", count=1000)
    _rate(cluster3, 1, 3, "data", count=1000)
    cluster3.restore_link(2, network="data")
    _rate(cluster3, 1, 2, "data", count=1000)


def test_slow_link_is_slow_both_ways_until_it_heals(cluster3: LocalCluster) -> None:
    cluster3.slow_link(3, rate_mbps=50, network="data")
    slow = max(_rate(cluster3, 1, 3, "data", 2 << 20), _rate(cluster3, 3, 1, "data", 2 << 20))
    assert slow < 50e6 / 8 * 1.5
    assert _rate(cluster3, 1, 2, "data") > 3 * slow
    cluster3.restore_link(3)
    assert _rate(cluster3, 1, 3, "data") > 3 * slow
    assert _rate(cluster3, 1, 3, "management", 2 << 20) < 100e6 / 8 * 1.5


def test_rank_is_stopped_continued_and_killed_where_the_run_says_it_is(
    cluster3: LocalCluster,
) -> None:
    node = cluster3.node(2)
    process = node.popen(["sleep", "600"])
    said = f"rank 0: elsewhere (pid 1), CPU\nrank 1: {node.plan.host} (pid {process.pid}), CPU\n"
    try:
        _wait_until(lambda: process.pid in node.processes(), "process inside")
        look = psutil.Process(process.pid)
        cluster3.stop_rank(1, said=said)
        _wait_until(lambda: look.status() == psutil.STATUS_STOPPED, "stopped")
        cluster3.continue_rank(1, said=said)
        _wait_until(lambda: look.status() != psutil.STATUS_STOPPED, "continued")
        with pytest.raises(ClusterError, match="no process of rank 0"):
            cluster3.kill_rank(0, said=said)
        with pytest.raises(ClusterError, match="does not run on node"):
            cluster3.kill_process(1, process.pid)
        cluster3.kill_rank(1, said=said)
        assert process.wait(10) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


def test_entry_program_runs_its_arguments_on_the_node(
    cluster3: LocalCluster, tmp_path: Path
) -> None:
    entry = cluster3.node(3).write_entry({"GREETING": "it's here"})
    done = subprocess.run(
        [entry, "sh", "-c", 'echo "$GREETING"; hostname; pwd; echo "$1"', "sh", "two words"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    host = cluster3.node(3).plan.host
    assert done.stdout.splitlines() == ["it's here", host, str(tmp_path), "two words"]


@pytest.mark.timeout(150)
def test_job_trains_with_one_worker_on_each_node(
    make_cluster: Callable[..., LocalCluster], jobs_on: Callable[[LocalNode], NodeJobs]
) -> None:
    cluster = make_cluster(2, cpus_per_node=1)
    jobs = jobs_on(cluster.node(1))
    with jobs.started("--name", "a", "--num-steps", "200") as process:
        process.wait_until(lambda: jobs.last_step("a") >= 1, "step 1", 100)
        ranks = ranks_in(process.stdout)
        assert sorted(ranks) == [0, 1]
        for node in cluster.nodes:
            pids = [pid for host, pid in ranks.values() if host == node.plan.host]
            assert len(pids) == 1
            assert cluster.worker_processes(node.plan.number) == pids
        assert all(cluster.bytes_on(n, "management")[1] > 0 for n in (1, 2))


@pytest.mark.timeout(120)
def test_nodes_are_killed_and_added_and_nothing_is_left_at_the_end(tmp_path: Path) -> None:
    with LocalCluster(
        2,
        head_cpus=0,
        without_data=[2],
        host_names={1: "loopback", 2: "nothing"},
        node_environment={2: {"NCCL_SOCKET_IFNAME": "ib0"}},
        folder=tmp_path,
    ) as cluster:
        one, two = cluster.nodes
        look = ["sh", "-c", "getent hosts $(hostname); echo $NCCL_SOCKET_IFNAME"]
        assert one.run(look).stdout.split()[:1] == ["127.0.1.1"]
        assert two.run(look).stdout == "ib0\n"
        assert cluster.bytes_on(2, "data") == (0, 0)
        with pytest.raises(ClusterError, match="no link to the data network"):
            cluster.cut_link(2, network="data")
        raylet = next(p for p in two.processes() if psutil.Process(p).name() == "raylet")
        assert psutil.Process(raylet).environ()["NCCL_SOCKET_IFNAME"] == "ib0"

        cluster.add_ray_node(on=2)
        address = two.plan.address
        assert _ray_addresses(cluster) == sorted([one.plan.address, address, address])

        own, others = two.processes(), one.processes()
        cluster.kill_node(2, is_power_loss=True)
        assert not [pid for pid in own if _runs(pid)]
        assert set(others) <= set(one.processes())
        with pytest.raises(ClusterError, match="was killed"):
            two.popen(["true"])

        assert cluster.add_node() == 3
        three = cluster.node(3)
        assert three.plan.address in _ray_addresses(cluster)
        _send(one, three, three.plan.host, 1000, three.plan.address)
        pids = [pid for node in cluster.nodes for pid in list_processes(node.plan.host)]
    _assert_nothing_left(cluster.plan.name, cluster.folder, pids)
    for number in (1, 2, 3):
        assert (tmp_path / "logs" / f"n{number}" / "raylet.out").is_file()


@pytest.mark.timeout(60)
def test_ipv6_cluster_has_no_other_addresses_and_heals(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = make_cluster(2, ip_version=6)
    assert _ray_addresses(cluster) == sorted(node.plan.address for node in cluster.nodes)
    shown = cluster.node(2).run(["ip", "-4", "-br", "address"]).stdout.split()
    assert shown[:1] == ["lo"]
    assert len(shown) == 3
    cluster.cut_link(2, network="data")
    with pytest.raises(ConnectionError):
        _rate(cluster, 1, 2, "data", count=1000)
    cluster.restore_link(2)
    _rate(cluster, 1, 2, "data", count=1000)


@pytest.mark.timeout(60)
def test_command_runs_on_the_head_and_gives_its_status() -> None:
    program = (
        "import os, ray, sys; ray.init(logging_level='ERROR'); "
        "print('nodes', len(ray.nodes()), os.uname().nodename); sys.exit(7)"
    )
    command = ["cluster", "local", "--nodes", "2", "--no-data-network", "--", "python", "-c"]
    done = subprocess.run(
        [sys.executable, "-m", "raydist.cli.main", *command, program],
        capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 nodes, Ray's head is node 1 at 10.")
    assert "data: " not in done.stdout
    host = lines[2].split()[1]
    assert f"nodes 2 {host}" in lines
    assert not [name for name in list_namespaces() if name.startswith(host.partition("-")[0])]


def _beds_of(pid: int) -> list[str]:
    return [name for name in list_namespaces() if owner_of(name) == pid]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_start_leaves_nothing(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _START, "2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        names = _wait_until(lambda: _beds_of(process.pid), "namespaces")
        bed = names[0].partition("-")[0]
        folder = choose_folder().with_name(bed)
        pids = _wait_until(lambda: list_processes(f"{bed}-n1")[1:], "Ray")
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
        assert out == b""
        assert process.returncode in (-signal.SIGINT, 128 + signal.SIGTERM)
        _assert_nothing_left(bed, folder, pids)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.timeout(90)
def test_leftovers_of_a_killed_owner_go_at_the_next_start() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _START, "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        names = _beds_of(process.pid)
        assert len(names) == 2
        pids = [pid for name in names for pid in list_processes(name)]
        assert len(pids) > 4
    finally:
        process.kill()
        process.communicate()
    assert set(names) <= set(list_namespaces())
    with LocalCluster(1) as cluster:
        _assert_nothing_left(
            names[0].partition("-")[0], cluster.folder.with_name(names[0].partition("-")[0]), pids
        )


def test_sweep_leaves_what_may_be_another_ones(tmp_path: Path) -> None:
    def bed(pid: int, **facts: Any) -> Path:
        folder = tmp_path / bed_name(owner_pid=pid, number=len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "owner.json").write_text(json.dumps(facts))
        return folder

    namespace = os.readlink("/proc/self/ns/pid")
    mine = {"started_unix_s": psutil.Process().create_time(), "pid_namespace": namespace}
    ended = subprocess.Popen(["true"])
    ended.wait()
    alive = bed(os.getpid(), **mine)
    elsewhere = bed(ended.pid, **{**mine, "pid_namespace": "pid:[1]"})
    dead = bed(ended.pid, **mine)
    reused = bed(os.getpid(), **{**mine, "started_unix_s": 1.0})
    foreign = tmp_path / "rdma00aab"
    foreign.mkdir()
    swept = sweep_leftovers(tmp_path)
    assert {dead.name, reused.name} <= set(swept)
    assert {path.name for path in tmp_path.iterdir()} == {
        p.name for p in (alive, elsewhere, foreign)
    }
