# SPDX-License-Identifier: Apache-2.0
"""Which network the ranks talk over, per node, with the reason. A pure decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NoReturn

from raydist.errors import ClusterError
from raydist.network.candidates import (
    display_names,
    hosts_of,
    is_usable,
    preferred_address,
    survey,
)
from raydist.network.cautions import cautions
from raydist.network.decision import (
    AS_SET,
    ONE_NODE,
    NetworkDecision,
    NetworkProbe,
    Run,
    first_pin,
    node_choice,
)
from raydist.network.facts import NodeNetwork
from raydist.network.presets import NCCL, Pin, pin_of, under_nccl_filter
from raydist.network.ranking import best_network, why
from raydist.network.routed import reach_by_routes


def choose_network(
    nodes: Sequence[NodeNetwork],
    *,
    probes: Sequence[NetworkProbe] = (),
    interface: str | None = None,
    node_interfaces: Mapping[str, str] = MappingProxyType({}),
    backend: Literal["nccl", "gloo"] = "nccl",
) -> NetworkDecision:
    """Choose the interface and address of every node; the order of ``nodes`` does not matter.

    What a node's site or the configuration has decided is kept; it also draws the other nodes to
    a network that has it. The rest take the fastest network that all nodes share: as measured,
    else as stated, and where neither tells them apart the one that carries the cluster's addresses.

    Args:
        nodes: Those that hold ranks, at least one.
        probes: Measurements, by label; a network without one is judged by its stated speed.
        interface: network.interface.
        node_interfaces: network.node_interfaces, by host name, address or node id.
        backend: Of the process group; gloo runs heed no NCCL_* variable.

    Raises:
        ClusterError: A setting cannot hold, or no network connects all nodes.
        RankUnreachableError: Every network has nodes that cannot reach each other.
    """
    nodes = sorted(nodes, key=lambda n: n.node_id)
    names, hosts = display_names(nodes), hosts_of(nodes)
    num_hosts = len(set(hosts.values()))
    heeds_nccl = backend == "nccl" and num_hosts > 1
    pins: dict[str, Pin] = {}
    for node in nodes:
        pin = pin_of(
            node,
            name=names[node.node_id],
            num_hosts=num_hosts,
            interface=interface,
            node_interfaces=node_interfaces,
            heeds_nccl=heeds_nccl,
        )
        if pin is not None:
            pins[node.node_id] = pin
    _require_equal_counts(nodes, pins, names)
    known = {key for n in nodes for key in (n.node, n.address, n.node_id)}
    notes = [
        f"network.node_interfaces names {key}, which holds no rank"
        for key in sorted(set(node_interfaces) - known)
    ]
    run = Run(nodes=nodes, names=names, hosts=hosts, pins=pins)
    if num_hosts == 1:
        return _on_one_host(run, notes)
    return _between_hosts(run, {p.label: p for p in probes}, notes, heeds_nccl=heeds_nccl)


def _between_hosts(
    run: Run, probes: Mapping[str, NetworkProbe], notes: Sequence[str], *, heeds_nccl: bool
) -> NetworkDecision:
    nodes = run.nodes
    if heeds_nccl:
        nodes = [n if n.node_id in run.pins else _filtered(n, run) for n in nodes]
    found = survey(nodes, pinned={key: pin.interface for key, pin in run.pins.items()})
    if not found.candidates and run.pins:
        return reach_by_routes(run, nodes, probes.get(AS_SET), notes)
    if not found.candidates:
        _refuse_apart(run, found.rejected)
    best, rejected = best_network(run, found.candidates, probes)
    because = why(best, [c for c in found.candidates if c != best], probes, nodes)
    choices = {}
    for node in nodes:
        key = node.node_id
        if pin := run.pins.get(key):
            source = pin.source
        elif run.pins:
            source = f"network of {first_pin(run)} ({best.label})"
        else:
            source = because or f"carries the cluster address {best.addresses[key]}" + _aside(node)
        value = node.environment.get(NCCL)
        if heeds_nccl and value and key not in run.pins:
            source += f"; within {NCCL}={value}"
        choices[key] = node_choice(
            node, interface=best.interfaces[key], address=best.addresses[key], source=source
        )
    reason = because or f"carries the cluster's addresses ({best.label})"
    if run.pins:
        reason = f"as set on {len(run.pins)} of {len(nodes)} nodes ({best.label})"
    return NetworkDecision(
        label=best.label,
        by_node=choices,
        reason=reason,
        rejected=(*found.rejected, *rejected),
        warnings=(*notes, *cautions(nodes, best.interfaces, run.names)),
    )


def _on_one_host(run: Run, notes: Sequence[str]) -> NetworkDecision:
    choices = {}
    for node in run.nodes:
        if pin := run.pins.get(node.node_id):
            choices[node.node_id] = node_choice(
                node, interface=pin.interface, address=pin.address, source=pin.source
            )
            continue
        carrier = node.carrier
        if carrier is None:
            _refuse_vanished(node, run.names[node.node_id])
        address = preferred_address(node, carrier)
        choices[node.node_id] = node_choice(
            node, interface=carrier.name, address=address, source="one node"
        )
    return NetworkDecision(
        label=ONE_NODE,
        by_node=choices,
        reason="all ranks are on one node",
        warnings=(*notes,),
        pinned=frozenset(run.pins),
    )


def _filtered(node: NodeNetwork, run: Run) -> NodeNetwork:
    left = under_nccl_filter(node)
    if left is node or any(is_usable(node, i, several_hosts=True) for i in left.interfaces):
        return left
    name = run.names[node.node_id]
    has = ", ".join(sorted(i.name for i in node.interfaces if i.addresses)) or "none"
    raise ClusterError(
        problem=f"Node {name}: {NCCL}={node.environment[NCCL]} of the node leaves no interface "
        f"that other nodes can reach (it has {has}).",
        way_out=f"Unset {NCCL} on {name}, or set network.node_interfaces[{node.node}].",
    )


def _aside(node: NodeNetwork) -> str:
    kind = node.carrier.kind if node.carrier is not None else "physical"
    texts = {"vpn": "; a VPN, but the cluster's way to this node", "bridge": "; a bridge"}
    return texts.get(kind, "")


def _require_equal_counts(
    nodes: Sequence[NodeNetwork], pins: Mapping[str, Pin], names: Mapping[str, str]
) -> None:
    counts = {n.node_id: pins[n.node_id].count if n.node_id in pins else 1 for n in nodes}
    if len(set(counts.values())) < 2:
        return
    several = max(counts, key=lambda key: (counts[key], key))
    other = min(counts, key=lambda key: (counts[key], key))
    raise ClusterError(
        problem=f"Node {names[several]}: GLOO_SOCKET_IFNAME names {counts[several]} interfaces, "
        f"and {names[other]} has {counts[other]}; gloo needs as many on every node.",
        way_out="Set as many on every node, or unset GLOO_SOCKET_IFNAME everywhere.",
    )


def _refuse_vanished(node: NodeNetwork, name: str) -> NoReturn:
    has = ", ".join(sorted(i.name for i in node.interfaces if i.addresses)) or "none"
    raise ClusterError(
        problem=f"Node {name}: no interface has the node's address {node.address} (it has {has}).",
        way_out="Start Ray there with --node-ip-address of an interface, or set network.interface.",
    )


def _refuse_apart(run: Run, rejected: Sequence[tuple[str, str]]) -> NoReturn:
    num_hosts = len(set(run.hosts.values()))
    for node in run.nodes:
        name, carrier = run.names[node.node_id], node.carrier
        if carrier is None:
            _refuse_vanished(node, name)
        trouble = None
        if not carrier.is_up:
            trouble = "is down"
        elif carrier.is_loopback:
            trouble = f"is loopback, and ranks sit on {num_hosts} nodes"
        elif carrier.kind == "container":
            trouble = "leads to containers on that host only"
        if trouble:
            raise ClusterError(
                problem=f"Node {name}: interface {carrier.name}, which has the node's address "
                f"{node.address}, {trouble}.",
                way_out="Start Ray there with --node-ip-address of a reachable interface, or set "
                "network.interface.",
            )
    close = "; ".join(f"{label}: {reason}" for label, reason in rejected[:3])
    raise ClusterError(
        problem=f"The {len(run.nodes)} nodes share no network" + (f" ({close})." if close else "."),
        way_out="Name each node's interface in network.node_interfaces, or leave the node that is "
        "apart out with scaling.exclude_nodes.",
    )
