# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of several nodes on one Linux machine, and the faults that befall one.

    with LocalCluster(3) as cluster:
        job = cluster.node(1).popen(["python", "jobs/llama_zero3.py"])
        cluster.cut_link(2, network="data")

Each node has its own network interfaces, host name, /dev/shm, temporary directory and Ray
directory. All share the file system, the clock and the process ids of the machine.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Literal

from raydist.errors import ClusterError, ConfigError
from raydist.testing.bed_ownership import (
    choose_folder,
    sigterm_raises,
    sweep_leftovers,
    write_owner,
)
from raydist.testing.bed_plan import BedPlan, HostName, NodePlan, hosts_file
from raydist.testing.local_node import LocalNode
from raydist.testing.local_ray import (
    DASHBOARD_PORT,
    GCS_PORT,
    RAYLET_ENVIRONMENT,
    WAIT_FOR_LISTENER,
    WAIT_FOR_NODES,
    RayOffer,
    head_arguments,
    host_port,
    start_arguments,
)
from raydist.testing.network_namespaces import Switch, requirements_missing
from raydist.testing.node_faults import NodeFaults

_START_TIMEOUT_S = 120.0
_POLL_S = 0.05
_MAX_NODES = 200


class LocalCluster(NodeFaults):
    """Nodes 1 to ``num_nodes`` from ``__enter__`` to ``__exit__``; node 1 is Ray's head.

    SIGTERM ends it like an exception while it is open, unless the program handles that signal
    itself. What a killed program left behind is removed at the next start of a cluster.

    Args:
        num_nodes: Nodes at the start.
        cpus_per_node: Logical CPUs that each node offers to Ray.
        gpus_per_node: Logical GPUs, none of which need exist.
        head_cpus: Those of node 1, where they differ; 0 for a head without workers.
        resources: Further logical resources, by node.
        data_network: Whether there is a second, unlimited network.
        without_data: Nodes that have no interface in it.
        ip_version: Of all addresses; 6 means that there are no others but 127.0.0.1.
        management_rate_mbps: Of the network by whose addresses Ray knows the nodes, in Mbit/s.
        host_names: What a node's own host name resolves to there, where it is not its address.
        node_environment: Variables of all processes of a node, as a site would set them.
        dashboard: Whether the head has a job server, without which `ray job submit` cannot be.
        object_store_bytes: Of each node.
        folder: Where logs are copied to at the end, under `logs/nN`; None keeps none.

    Raises:
        ConfigError: So many nodes cannot be.
    """

    def __init__(
        self,
        num_nodes: int,
        *,
        cpus_per_node: int = 2,
        gpus_per_node: int = 0,
        head_cpus: int | None = None,
        resources: Mapping[int, Mapping[str, float]] | None = None,
        data_network: bool = True,
        without_data: Collection[int] = (),
        ip_version: Literal[4, 6] = 4,
        management_rate_mbps: float | None = 100.0,
        host_names: Mapping[int, HostName] | None = None,
        node_environment: Mapping[int, Mapping[str, str]] | None = None,
        dashboard: bool = False,
        object_store_bytes: int = 80 * 2**20,
        folder: Path | None = None,
    ) -> None:
        if not 1 <= num_nodes <= _MAX_NODES:
            raise ConfigError(
                problem=f"A local cluster has 1 to {_MAX_NODES} nodes, not {num_nodes}.",
                way_out="Each takes about 250 MB of memory.",
            )
        self._num_nodes = num_nodes
        self._cpus_per_node, self._gpus_per_node = cpus_per_node, gpus_per_node
        self._head_cpus = cpus_per_node if head_cpus is None else head_cpus
        self._resources = resources or {}
        self._data_network, self._without_data = data_network, without_data
        self._host_names = host_names or {}
        self._node_environment = node_environment or {}
        self._dashboard = dashboard
        self._object_store_bytes = object_store_bytes
        self._keep_logs_in = folder
        self._ending = ExitStack()
        self._loopback = "::1" if ip_version == 6 else "127.0.0.1"
        self.folder = choose_folder()
        self.plan = BedPlan(
            name=self.folder.name,
            seed=secrets.randbits(24),
            ip_version=ip_version,
            management_rate_mbps=management_rate_mbps,
        )
        super().__init__(Switch(self.plan))

    def __enter__(self) -> LocalCluster:
        """Start it.

        Raises:
            ClusterError: This machine cannot hold one, or Ray did not start.
        """
        missing = requirements_missing()
        if missing:
            raise ClusterError(
                problem=missing, way_out="Without one, run a job as it is: it starts Ray itself."
            )
        sweep_leftovers(self.folder.parent)
        self._ending.enter_context(sigterm_raises())
        try:
            self._open()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    @property
    def address(self) -> str:
        """What RAY_ADDRESS is to be, for a driver inside."""
        return host_port(self.node(1).plan.address, GCS_PORT)

    @property
    def job_address(self) -> str:
        """URL of the job server, for a client on node 1."""
        return f"http://{host_port(self._loopback, DASHBOARD_PORT)}"

    def add_node(self) -> int:
        """Start one more node, wait until it is registered, and return its number."""
        number = max(self._nodes, default=0) + 1
        self._add_nodes([number])
        self._start_ray(number)
        self._wait_until_registered()
        return number

    def add_ray_node(self, *, on: int) -> None:
        """Start another Ray node on a node's host, as after `ray start` twice, and wait for it."""
        self._start_ray(on)
        self._wait_until_registered()

    def _open(self) -> None:
        self._ending.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700)
        write_owner(self.folder)
        for name in ("ray", "tmp"):
            (self.folder / name).mkdir()
        token = self.folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self._ending.callback(self._keep_logs)
        self._ending.callback(self._reap)
        self._ending.callback(self._switch.close)
        self._switch.open()
        self._add_nodes(range(1, self._num_nodes + 1))
        self._start_ray(1)
        self._wait_until_listening(self.node(1).plan.address, GCS_PORT)
        for number in range(2, self._num_nodes + 1):
            self._start_ray(number)
        self._wait_until_registered()
        if self._dashboard:
            self._wait_until_listening(self._loopback, DASHBOARD_PORT)

    def _close(self) -> None:
        # A second Ctrl-C would leave the rest behind; it arrives when nothing is left.
        signals = {signal.SIGINT, signal.SIGTERM}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            self._ending.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _reap(self) -> None:
        for node in self.nodes:
            node.reap()

    def _keep_logs(self) -> None:
        if self._keep_logs_in is not None:
            for node in self.nodes:
                node.copy_logs(self._keep_logs_in / "logs" / node.folder.name)

    def _add_nodes(self, numbers: Collection[int]) -> None:
        plans = [node.plan for node in self.nodes]
        new = [self._plan_node(number) for number in numbers]
        plans += new
        for node in self.nodes:
            node.write_hosts(self._hosts(plans, node.plan))
        for plan in new:
            self._switch.attach(plan)
            node = LocalNode(
                plan,
                bed_folder=self.folder,
                hosts=self._hosts(plans, plan),
                environment=self._environment(plan, head=plans[0]),
            )
            self._nodes[plan.number] = node
            node.open()

    def _plan_node(self, number: int) -> NodePlan:
        has_data = self._data_network and number not in self._without_data
        return self.plan.node(number, has_data_network=has_data)

    def _hosts(self, plans: list[NodePlan], own: NodePlan) -> str:
        return hosts_file(plans, own, own_name=self._host_names.get(own.number, "management"))

    def _environment(self, plan: NodePlan, *, head: NodePlan) -> dict[str, str]:
        here = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return {
            **here,
            # Job drivers and workers find this environment's python and tools first.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "TMPDIR": str(self.folder / "tmp"),
            "RAY_TMPDIR": str(self.folder),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "RAY_ADDRESS": host_port(head.address, GCS_PORT),
            # For `ray job submit`, which reads this one first.
            **({"RAY_API_SERVER_ADDRESS": self.job_address} if self._dashboard else {}),
            **self._node_environment.get(plan.number, {}),
        }

    def _start_ray(self, number: int) -> None:
        node = self.node(number)
        cpus = self._head_cpus if number == 1 else self._cpus_per_node
        offer = RayOffer(
            cpus=cpus,
            gpus=self._gpus_per_node if cpus else 0,
            object_store_bytes=self._object_store_bytes,
            resources=self._resources.get(number, {}),
        )
        arguments = start_arguments(offer, address=node.plan.address, index=len(node.rays))
        if number == 1 and not node.rays:
            loopback = self._loopback if self._dashboard else None
            arguments += head_arguments(folder=self.folder / "ray", loopback=loopback)
        else:
            arguments.append(f"--address={self.address}")
        node.start_ray(arguments, env=RAYLET_ENVIRONMENT)

    def _wait_until_listening(self, address: str, port: int) -> None:
        self._wait_inside("-S", "-c", WAIT_FOR_LISTENER, address, str(port))

    def _wait_until_registered(self) -> None:
        """Wait until every Ray node that runs is known to the head."""
        addresses = [n.plan.address for n in self.nodes for ray in n.rays if ray.is_running]
        self._wait_inside("-c", WAIT_FOR_NODES, self.address, *addresses)

    def _wait_inside(self, *arguments: str) -> None:
        """Run Python on node 1 until it ends, or a Ray node of ours does.

        Raises:
            ClusterError: A Ray node ended, or it took too long.
        """
        watched = [ray for node in self.nodes for ray in node.rays if ray.is_running]
        waiter = self.node(1).popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + _START_TIMEOUT_S
        try:
            while waiter.poll() is None:
                ended = [ray for ray in watched if not ray.is_running]
                if ended or time.monotonic() > deadline:
                    words = [ray.last_words() for ray in ended or watched]
                    raise ClusterError(
                        problem="Ray did not start on the local cluster within "
                        f"{_START_TIMEOUT_S:g} s: {'; '.join(words)}",
                        way_out="Look for a full /tmp or too little free memory; with folder= the "
                        "logs are kept.",
                    )
                time.sleep(_POLL_S)
        finally:
            waiter.kill()
            _, said = waiter.communicate()
        if waiter.returncode != 0:
            raise ClusterError(problem=f"The local cluster's head does not answer: {said.strip()}")
