# SPDX-License-Identifier: Apache-2.0
"""Jobs on nodes whose networks are unlike, slow, cut or misconfigured.

Real: nodes with interfaces and names of their own, Ray, gloo, DeepSpeed. Made: the wires.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from job_process import ROOT, Finished
from node_jobs import NodeJobs

from raydist.testing.local_cluster import LocalCluster
from raydist.testing.local_node import LocalNode

pytestmark = pytest.mark.timeout(180)
JobsOn = Callable[[LocalNode], NodeJobs]
ClusterMaker = Callable[..., LocalCluster]

_GLOBAL_BATCH = ("--batch.global-batch-size", "12")
_THREE = (*_GLOBAL_BATCH, "--scaling.nodes", "3", "--scaling.workers", "3")
_TWO = (*_GLOBAL_BATCH, "--scaling.nodes", "2", "--scaling.workers", "2")
_SHORT = ("--num-steps", "4")
_HOLD_PORT = """
import socket, sys
with socket.create_server(("", int(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""
_LEAVE_RESERVATION = """
import ray
from ray.util.placement_group import placement_group
ray.init(logging_level="ERROR")
name = f"raydist-job-{ray.get_runtime_context().get_job_id()}-0123abcd"
group = placement_group([{"CPU": 2}] * 3, "STRICT_SPREAD", name=name, lifetime="detached")
assert group.wait(30)
"""
_ONCE = ("--fault.max-worker-failures", "0")


def _interfaces(done: Finished) -> dict[int, tuple[str, str]]:
    """Each rank's interface and address, from its line at the start."""
    lines = re.findall(r"^rank (\d+): .* threads, (\S+) (\S+) \(", done.stdout, re.MULTILINE)
    return {int(rank): (interface, address) for rank, interface, address in lines}


def _data(cluster: LocalCluster, *numbers: int) -> list[tuple[str, str]]:
    links = [cluster.node(number).plan.find_link("data") for number in numbers]
    return [(link.interface, link.address) for link in links if link is not None]


def _host(cluster: LocalCluster, number: int) -> str:
    return cluster.node(number).plan.host


def test_job_trains_over_the_fast_network_without_a_setting(
    cluster3: LocalCluster, jobs_on: JobsOn
) -> None:
    jobs = jobs_on(cluster3.node(1))

    def count(network: str) -> int:
        return sum(sum(cluster3.bytes_on(n, network)) for n in (1, 2, 3))  # type: ignore[arg-type]

    with jobs.started(*_THREE, "--name", "fast", "--num-steps", "30") as process:
        process.wait_until(lambda: jobs.last_step("fast") >= 5, "step 5")
        before = {network: count(network) for network in ("data", "management")}
        process.wait_until(lambda: jobs.last_step("fast") >= 25, "step 25")
        during = {network: count(network) - before[network] for network in before}
        done = process.wait(120)
    assert done.exit_code == 0, done
    assert "finished 30 steps" in done.stdout
    assert sorted(_interfaces(done).values()) == sorted(_data(cluster3, 1, 2, 3))
    assert "fastest network all 3 nodes share" in done.stdout
    assert re.search(r"preflight: 3 nodes tried in \d+\.\d s", done.stdout)
    assert "network warning" not in done.stdout
    # 20 steps of a model of 0.1 M parameters; Ray's own traffic goes over the other network.
    assert during["data"] > 4 * during["management"]


def test_dry_run_shows_every_ranks_network_and_reserves_nothing(
    cluster3: LocalCluster, jobs_on: JobsOn
) -> None:
    jobs = jobs_on(cluster3.node(1))
    done = jobs.run(*_THREE, "--name", "planned", "--dry-run")
    assert done.exit_code == 0, done
    for number, (interface, address) in enumerate(_data(cluster3, 1, 2, 3), 1):
        host = _host(cluster3, number)
        assert re.search(rf"^\d +{host} +CPU +{interface} +{address} ", done.stdout, re.MULTILINE)
    assert "3 x [2 CPU], 1 on each of 3 nodes = 3 bundles of [2 CPU], STRICT_SPREAD" in done.stdout
    assert not jobs.storage.exists()


@pytest.mark.parametrize("has_carrier", [True, False])
def test_cut_data_link_is_named_and_the_job_trains_over_the_other_network(
    cluster3: LocalCluster, jobs_on: JobsOn, has_carrier: bool
) -> None:
    cluster3.cut_link(3, network="data", has_carrier=has_carrier)
    done = jobs_on(cluster3.node(1)).run(*_THREE, *_SHORT, "--name", "cut")
    assert done.exit_code == 0, done
    host = _host(cluster3, 3)
    (warning,) = re.findall(r"^network warning: (.*)$", done.stdout, re.MULTILINE)
    if has_carrier:
        assert f"does not reach {host}" in warning
    else:
        assert f"{_data(cluster3, 3)[0][0]} of {host} is down" in warning
    addresses = {address for _, address in _interfaces(done).values()}
    assert addresses == {cluster3.node(n).plan.address for n in (1, 2, 3)}


def test_interfaces_that_are_named_end_the_job_when_one_is_cut_and_say_which(
    cluster3: LocalCluster, jobs_on: JobsOn
) -> None:
    cluster3.cut_link(3, network="data", has_carrier=True)
    named = [
        word
        for number in (1, 2, 3)
        for word in (_host(cluster3, number), _data(cluster3, number)[0][0])
    ]
    done = jobs_on(cluster3.node(1)).run(
        *_THREE, *_SHORT, *_ONCE, "--name", "named", "--network.node-interfaces", *named
    )
    assert done.exit_code == 4, done
    assert f"Node {_host(cluster3, 3)} cannot be reached from" in done.stderr
    assert "network.node_interfaces" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_excluded_node_holds_no_rank_and_its_broken_link_does_not_matter(
    cluster3: LocalCluster, jobs_on: JobsOn
) -> None:
    cluster3.cut_link(3, network="data", has_carrier=True)
    done = jobs_on(cluster3.node(1)).run(
        *_TWO, *_SHORT, "--name", "two", "--scaling.exclude-nodes", _host(cluster3, 3)
    )
    assert done.exit_code == 0, done
    assert sorted(_interfaces(done).values()) == sorted(_data(cluster3, 1, 2))
    assert "network warning" not in done.stdout


def test_port_that_is_taken_on_rank_0s_node_ends_the_job_with_the_key(
    cluster3: LocalCluster, jobs_on: JobsOn
) -> None:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    with ExitStack() as ending:
        for node in cluster3.nodes:
            holder = node.popen(
                [sys.executable, "-S", "-c", _HOLD_PORT, str(port)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            ending.callback(holder.communicate)
            ending.callback(holder.kill)
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
        done = jobs_on(cluster3.node(1)).run(
            *_THREE, *_SHORT, "--name", "taken", "--network.master-port", str(port)
        )
    assert done.exit_code == 2, done
    assert f"port {port}" in done.stderr
    assert "network.master_port" in done.stderr


def test_torchrun_takes_the_interface_that_leads_to_rank_0(
    cluster3: LocalCluster, jobs_on: JobsOn
) -> None:
    jobs = jobs_on(cluster3.node(2))
    link = cluster3.node(2).plan.find_link("data")
    assert link is not None
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    job = jobs.command(*_SHORT, *_GLOBAL_BATCH, "--name", "torchrun", launcher="torchrun")
    (script,) = [n for n, word in enumerate(job) if word.endswith("llama_zero3.py")]
    processes = []
    with ExitStack() as ending:
        for node_rank, number in enumerate((2, 3)):
            launcher = [
                str(Path(sys.executable).parent / "torchrun"), "--nnodes", "2",
                "--nproc-per-node", "1", "--node-rank", str(node_rank),
                "--master-addr", link.address, "--master-port", str(port),
            ]  # fmt: skip
            process = cluster3.node(number).popen(
                [*launcher, *job[script:]], env={"OMP_NUM_THREADS": "1"}, cwd=ROOT,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
            ending.callback(process.communicate)
            ending.callback(process.kill)
            processes.append(process)
        stdout, stderr = processes[0].communicate(timeout=90)
    assert processes[0].returncode == 0, stderr
    done = Finished(exit_code=0, stdout=stdout, stderr=stderr)
    assert list(_interfaces(done).values()) == _data(cluster3, 2, 3)


def test_reservation_that_a_dead_run_left_is_released(
    cluster3: LocalCluster, jobs_on: JobsOn
) -> None:
    left = cluster3.node(1).run([sys.executable, "-c", _LEAVE_RESERVATION])
    assert left.returncode == 0, left.stderr
    done = jobs_on(cluster3.node(1)).run(*_THREE, *_SHORT, "--name", "after")
    assert done.exit_code == 0, done
    assert "waiting for" not in done.stdout


def test_more_ranks_than_there_can_ever_be_are_refused_before_anything_starts(
    cluster3: LocalCluster, jobs_on: JobsOn
) -> None:
    jobs = jobs_on(cluster3.node(1))
    done = jobs.run("--scaling.workers", "4", "--scaling.nodes", "4", "--name", "many")
    assert done.exit_code == 2, done
    assert "asks for 4 nodes with [2 CPU] each; the cluster has 3 free" in done.stderr
    assert not (jobs.storage / "many").exists()


def test_ranks_beside_a_head_without_cpus_whose_names_resolve_to_loopback(
    make_cluster: ClusterMaker, jobs_on: JobsOn
) -> None:
    names = {number: "loopback" for number in (1, 2, 3)}
    cluster = make_cluster(3, head_cpus=0, host_names=names)
    done = jobs_on(cluster.node(1)).run(*_TWO, *_SHORT, "--name", "headless")
    assert done.exit_code == 0, done
    assert sorted(_interfaces(done).values()) == sorted(_data(cluster, 2, 3))
    assert f"rank 0: {_host(cluster, 1)}" not in done.stdout


def test_two_ray_nodes_on_one_host_hold_ranks_of_their_own(
    make_cluster: ClusterMaker, jobs_on: JobsOn
) -> None:
    cluster = make_cluster(2)
    cluster.add_ray_node(on=2)
    done = jobs_on(cluster.node(1)).run(*_THREE, *_SHORT, "--name", "shared-host")
    assert done.exit_code == 0, done
    hosts = re.findall(r"^rank \d: (\S+) ", done.stdout, re.MULTILINE)
    assert sorted(hosts) == [_host(cluster, n) for n in (1, 2, 2)]
    assert set(_interfaces(done).values()) == set(_data(cluster, 1, 2))


def test_nodes_with_ipv6_alone_train_over_the_fast_network(
    make_cluster: ClusterMaker, jobs_on: JobsOn
) -> None:
    cluster = make_cluster(2, ip_version=6)
    done = jobs_on(cluster.node(1)).run(*_TWO, *_SHORT, "--name", "six")
    assert done.exit_code == 0, done
    assert sorted(_interfaces(done).values()) == sorted(_data(cluster, 1, 2))
    assert all(":" in address for _, address in _interfaces(done).values())


def test_node_without_the_data_network_leaves_the_one_that_all_have(
    make_cluster: ClusterMaker, jobs_on: JobsOn
) -> None:
    cluster = make_cluster(2, without_data=(2,))
    done = jobs_on(cluster.node(1)).run(*_TWO, *_SHORT, "--name", "apart")
    assert done.exit_code == 0, done
    addresses = {address for _, address in _interfaces(done).values()}
    assert addresses == {cluster.node(n).plan.address for n in (1, 2)}


def test_variable_left_behind_on_one_node_ends_the_job_and_is_named(
    make_cluster: ClusterMaker, jobs_on: JobsOn
) -> None:
    cluster = make_cluster(2, node_environment={2: {"GLOO_SOCKET_IFNAME": "^lo,docker0"}})
    done = jobs_on(cluster.node(1)).run(*_TWO, *_SHORT, "--name", "stale")
    assert done.exit_code == 2, done
    assert f"Node {_host(cluster, 2)}: GLOO_SOCKET_IFNAME" in done.stderr
    assert "^" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_what_a_site_has_set_is_kept_and_said(make_cluster: ClusterMaker, jobs_on: JobsOn) -> None:
    management = {1: "eth0", 2: "eno1"}
    cluster = make_cluster(
        2, node_environment={n: {"GLOO_SOCKET_IFNAME": name} for n, name in management.items()}
    )
    done = jobs_on(cluster.node(1)).run(*_TWO, *_SHORT, "--name", "kept")
    assert done.exit_code == 0, done
    assert {interface for interface, _ in _interfaces(done).values()} == set(management.values())
    assert done.stdout.count("(kept from GLOO_SOCKET_IFNAME") == 2
