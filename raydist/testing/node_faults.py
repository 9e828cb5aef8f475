# SPDX-License-Identifier: Apache-2.0
"""The faults that befall the nodes of a local cluster, their links and their ranks."""

from __future__ import annotations

import signal
from typing import Literal

from raydist.errors import ClusterError
from raydist.testing.bed_plan import Link, Network, ranks_in
from raydist.testing.local_node import LocalNode
from raydist.testing.network_namespaces import Switch


class NodeFaults:
    """Nodes on a switch, and what can be done to them. Links and processes heal by the inverse."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        self._nodes: dict[int, LocalNode] = {}

    @property
    def nodes(self) -> tuple[LocalNode, ...]:
        """All nodes, killed ones among them."""
        return tuple(self._nodes.values())

    @property
    def switch_namespace(self) -> str:
        """Namespace of the bridges `management` and `data`, with a port NETWORK-N per node."""
        return self._switch.plan.switch

    def node(self, number: int) -> LocalNode:
        """Return node ``number``, counted from 1; its `popen` and `run` start jobs.

        Raises:
            ClusterError: There is none.
        """
        if number not in self._nodes:
            raise ClusterError(
                problem=f"The local cluster has no node {number}; it has {sorted(self._nodes)}."
            )
        return self._nodes[number]

    def kill_node(self, number: int, *, is_power_loss: bool = False) -> None:
        """Kill every process of a node.

        Args:
            number: The node.
            is_power_loss: Cut its links first, so that its peers are told nothing; otherwise
                the node's kernel lives on and closes their connections.
        """
        node = self.node(number)
        if is_power_loss:
            self.cut_link(number, network="all")
        node.kill()

    def kill_rank(self, rank: int, *, said: str) -> None:
        """Kill a rank's process; ``said`` is the run's output, which tells where the rank is."""
        self._signal_rank(rank, said, signal.SIGKILL)

    def stop_rank(self, rank: int, *, said: str) -> None:
        """Stop a rank's process as a hang does: it keeps its memory and its connections."""
        self._signal_rank(rank, said, signal.SIGSTOP)

    def continue_rank(self, rank: int, *, said: str) -> None:
        """Let a stopped rank go on."""
        self._signal_rank(rank, said, signal.SIGCONT)

    def kill_process(self, number: int, pid: int) -> None:
        """Kill one process of a node."""
        self.node(number).signal(pid, signal.SIGKILL)

    def stop_process(self, number: int, pid: int) -> None:
        """Stop one process of a node."""
        self.node(number).signal(pid, signal.SIGSTOP)

    def continue_process(self, number: int, pid: int) -> None:
        """Let a stopped process of a node go on."""
        self.node(number).signal(pid, signal.SIGCONT)

    def worker_processes(self, number: int) -> list[int]:
        """Return the ids of a node's training workers, one per rank, the oldest first."""
        return self.node(number).worker_processes()

    def cut_link(
        self, number: int, *, network: Network | Literal["all"], has_carrier: bool = False
    ) -> None:
        """Let nothing through between a node and a network.

        Args:
            number: The node.
            network: One, or all that the node has.
            has_carrier: Whether its interface goes on looking healthy, as when a switch further
                away fails; otherwise it loses its carrier, as when a cable is pulled.
        """
        for link in self._links(number, network):
            self._switch.cut(link, has_carrier=has_carrier)

    def restore_link(self, number: int, *, network: Network | Literal["all"] = "all") -> None:
        """Undo cuts and slowness of a node's links."""
        for link in self._links(number, network):
            self._switch.restore(self.node(number).plan, link)

    def slow_link(
        self, number: int, *, rate_mbps: float, network: Network | Literal["all"]
    ) -> None:
        """Limit a node's links in both directions, in Mbit/s."""
        for link in self._links(number, network):
            self._switch.set_rate(self.node(number).plan, link, rate_mbps)

    def bytes_on(self, number: int, network: Network) -> tuple[int, int]:
        """Return what a node has received and sent over a network since it started, in bytes."""
        return self._switch.count_bytes(self.node(number).plan, network)

    def _links(self, number: int, network: Network | Literal["all"]) -> list[Link]:
        """Return the links that are meant.

        Raises:
            ClusterError: The node has none there.
        """
        plan = self.node(number).plan
        found = [link for link in plan.links if network in ("all", link.network)]
        if not found:
            raise ClusterError(problem=f"Node {plan.host} has no link to the {network} network.")
        return found

    def _signal_rank(self, rank: int, said: str, number: signal.Signals) -> None:
        """Signal a rank.

        Raises:
            ClusterError: The output does not tell where it is.
        """
        found = ranks_in(said).get(rank)
        by_host = {node.plan.host: node for node in self.nodes}
        if found is None or found[0] not in by_host:
            raise ClusterError(
                problem=f"The output names no process of rank {rank} on this cluster; it has "
                f"{ranks_in(said) or 'no ranks'}.",
                way_out="Wait for the line `rank N: HOST (pid P)` before a fault.",
            )
        host, pid = found
        by_host[host].signal(pid, number)
