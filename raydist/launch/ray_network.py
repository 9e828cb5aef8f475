# SPDX-License-Identifier: Apache-2.0
"""Settling a worker group's network: what each node has, what answers, and the choice.

The decision is ``raydist.network``'s; here it is carried out over functions called on one
process of every node, be it a rank or a doctor's actor.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from raydist.config import NetworkConfig
from raydist.network import (
    ONE_NODE,
    CandidateNetwork,
    NetworkDecision,
    NetworkProbe,
    NodeNetwork,
    candidate_networks,
    choose_network,
    inventory,
    routes,
)
from raydist.network.environment import active_rdma
from raydist.network.facts import RdmaKind
from raydist.network.faults import NetworkFault, network_faults
from raydist.network.probe import ProbeServer, send_rate_mbps, try_peers

_RATE_SECONDS = 0.2
_ROUTED_KINDS = frozenset({"physical", "bond", "vlan", "infiniband", "virtual", "wireless", "vpn"})
_MAX_ROUTES = 500_000
"""In all: 200 nodes of 9 cards. Without routes, networks are told by their subnets alone."""

_server: ProbeServer | None = None  # One in a process, between open_probes and close_probes.


class OnNodes(Protocol):
    """Calls a function on one process of each node, all at once; returns results by node id."""

    def __call__(
        self, function: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]], /
    ) -> dict[str, Any]:
        """Call ``function`` with each node's arguments."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SettledNetwork:
    """Each node's network by node id, what was chosen of it, and what is broken elsewhere."""

    nodes: Mapping[str, NodeNetwork]
    decision: NetworkDecision
    faults: tuple[NetworkFault, ...] = ()

    @property
    def shared_rdma(self) -> frozenset[RdmaKind]:
        """Kinds of RDMA that every node can use."""
        return frozenset.intersection(*(frozenset(active_rdma(n)) for n in self.nodes.values()))

    def describe(self) -> list[str]:
        """Return lines: what was taken and why, what was not and why, what is odd."""
        decision = self.decision
        lines = [f"network: {decision.label}, {decision.reason}"]
        lines += [f"network not taken: {label}: {why}" for label, why in decision.rejected]
        lines += [f"network warning: {fault.what}" for fault in self.faults]
        lines += [f"network warning: {text}" for text in decision.warnings]
        return lines


def settle_network(
    on_nodes: OnNodes,
    addresses: Mapping[str, str],
    network: NetworkConfig,
    *,
    backend: Literal["nccl", "gloo"],
    try_it: bool,
) -> SettledNetwork:
    """Look at every node, try the networks they share, and choose one.

    Args:
        on_nodes: Reaches the nodes.
        addresses: The cluster's address of each node, by node id.
        network: What the configuration says of interfaces and time limits.
        backend: Of the process group that is to be.
        try_it: Whether every node must answer every other before the choice stands.

    Raises:
        ClusterError: No network serves; names the node.
        RankUnreachableError: The nodes do not answer each other; names which.
    """
    nodes: dict[str, NodeNetwork] = on_nodes(
        describe_node, {node: (node, address) for node, address in addresses.items()}
    )
    nodes = _with_routes(on_nodes, nodes)
    facts = list(nodes.values())

    def choose(probes: Sequence[NetworkProbe]) -> NetworkDecision:
        return choose_network(
            facts,
            probes=probes,
            interface=network.interface,
            node_interfaces=network.node_interfaces,
            backend=backend,
        )

    decision = choose(())
    # Interfaces that were named are used as named: nothing else is tried beside them.
    candidates = [] if decision.pinned else candidate_networks(facts)
    probes: list[NetworkProbe] = []
    while try_it and decision.label not in (ONE_NODE, *(probe.label for probe in probes)):
        if decision.label not in {candidate.label for candidate in candidates}:
            candidates = [_as_candidate(decision)]
        probes += _try_networks(on_nodes, candidates, network.reach_timeout_s)
        decision = choose(probes)
    return SettledNetwork(
        nodes=nodes, decision=decision, faults=tuple(network_faults(facts, probes))
    )


def _with_routes(on_nodes: OnNodes, nodes: dict[str, NodeNetwork]) -> dict[str, NodeNetwork]:
    """Ask every node for its routes to all addresses of the others."""
    own = {
        node: [ip for i in facts.interfaces if i.kind in _ROUTED_KINDS for ip in i.ips]
        for node, facts in nodes.items()
    }
    if len(nodes) == 1 or len(nodes) * sum(map(len, own.values())) > _MAX_ROUTES:
        return nodes
    peers = {node: [ip for n, ips in own.items() if n != node for ip in ips] for node in nodes}
    found = on_nodes(find_routes, {node: (addresses,) for node, addresses in peers.items()})
    return {node: replace(facts, sources=found[node]) for node, facts in nodes.items()}


def _as_candidate(decision: NetworkDecision) -> CandidateNetwork:
    return CandidateNetwork(
        label=decision.label,
        addresses={node: choice.address for node, choice in decision.by_node.items()},
        interfaces={node: choice.interface for node, choice in decision.by_node.items()},
        speed_mbps=None,
    )


def _try_networks(
    on_nodes: OnNodes, candidates: Sequence[CandidateNetwork], timeout_s: float
) -> list[NetworkProbe]:
    """Have every node ask every other on each network; measure them where there are several."""
    node_ids = list(candidates[0].addresses)
    token = secrets.token_bytes(16)
    own = {
        node: (tuple(dict.fromkeys(c.addresses[node] for c in candidates)), token)
        for node in node_ids
    }
    # Where something breaks before the end, they close themselves.
    ports: dict[str, dict[str, int]] = on_nodes(open_probes, own)
    probes = [
        _try_network(
            on_nodes,
            candidate,
            ports,
            token=token,
            timeout_s=timeout_s,
            with_rates=len(candidates) > 1,
        )
        for candidate in candidates
    ]
    on_nodes(close_probes, {node: () for node in node_ids})
    return probes


def _try_network(
    on_nodes: OnNodes,
    candidate: CandidateNetwork,
    ports: Mapping[str, Mapping[str, int]],
    *,
    token: bytes,
    timeout_s: float,
    with_rates: bool,
) -> NetworkProbe:
    """Have every node ask every other over one network; a node that cannot listen is silent."""
    node_ids = list(candidate.addresses)
    where = {n: (a, ports[n][a]) for n, a in candidate.addresses.items() if a in ports[n]}
    answers: dict[str, dict[str, str | None]] = on_nodes(
        ask_peers,
        {
            node: (
                {n: w for n, w in where.items() if n != node},
                candidate.addresses[node],
                token,
                timeout_s,
            )
            for node in node_ids
        },
    )
    unreachable = [
        (node, peer)
        for node in node_ids
        for peer in node_ids
        if node != peer and (peer not in where or answers[node][peer] is not None)
    ]
    rates: dict[tuple[str, str], float | None] = {}
    if with_rates and not unreachable:
        rates = _ring_rates(on_nodes, candidate, where, token, timeout_s)
        # A few bytes came through and many do not: an MTU that is not everyone's, say.
        unreachable = [pair for pair, rate in rates.items() if rate is None]
    known = {pair: rate for pair, rate in rates.items() if rate is not None}
    return NetworkProbe(
        label=candidate.label,
        unreachable=tuple(unreachable),
        rates_mbps=known,
        slowest_mbps=min(known.values(), default=None),
    )


def _ring_rates(
    on_nodes: OnNodes,
    candidate: CandidateNetwork,
    where: Mapping[str, tuple[str, int]],
    token: bytes,
    timeout_s: float,
) -> dict[tuple[str, str], float | None]:
    """Let every node send to the next one, all at once, as a ring all-reduce does.

    Returns:
        Mb/s by (from, to) node id; None where the data did not get through.
    """
    node_ids = list(where)
    following = dict(zip(node_ids, [*node_ids[1:], node_ids[0]], strict=True))
    rates = on_nodes(
        measure_rate,
        {
            node: (where[following[node]], candidate.addresses[node], token, timeout_s)
            for node in node_ids
        },
    )
    return {(node, following[node]): rate for node, rate in rates.items()}


def describe_node(node_id: str, address: str) -> NodeNetwork:
    """Return this node's network. On the node."""
    return inventory(node_id=node_id, address=address)


def find_routes(peers: Sequence[str]) -> dict[str, str]:
    """Return the address this node would send from, by peer address. On the node."""
    return routes(peers)


def open_probes(addresses: Sequence[str], token: bytes) -> dict[str, int]:
    """Listen on the addresses; returns each one's port. On the node."""
    global _server
    close_probes()
    _server = ProbeServer(addresses, token=token)
    return _server.ports


def ask_peers(
    peers: Mapping[str, tuple[str, int]], source: str, token: bytes, timeout_s: float
) -> dict[str, str | None]:
    """Ask every other node. On the node."""
    return try_peers(peers, source=source, token=token, timeout_s=timeout_s)


def measure_rate(
    where: tuple[str, int], source: str, token: bytes, timeout_s: float
) -> float | None:
    """Send to the next node for a moment; returns Mb/s. On the node."""
    return send_rate_mbps(
        where, source=source, token=token, seconds=_RATE_SECONDS, timeout_s=timeout_s
    )


def close_probes() -> None:
    """Stop listening. On the node."""
    global _server
    if _server is not None:
        _server.close()
        _server = None
