# SPDX-License-Identifier: Apache-2.0
"""Interfaces that settings decide and no one network has: who reaches them by route. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from raydist.errors import ClusterError
from raydist.network.candidates import is_usable, shared_address
from raydist.network.cautions import cautions
from raydist.network.decision import (
    AS_SET,
    NetworkDecision,
    NetworkProbe,
    NodeChoice,
    Run,
    first_pin,
    node_choice,
)
from raydist.network.facts import NodeNetwork
from raydist.network.ranking import refuse_unreachable


def reach_by_routes(
    run: Run, nodes: Sequence[NodeNetwork], probe: NetworkProbe | None, notes: Sequence[str]
) -> NetworkDecision:
    """Keep the pins, and take on every other node the interface that routes to them.

    Args:
        run: With at least one pin.
        nodes: Of the run, with the interfaces that they may use.
        probe: Of AS_SET, None before it was tried.
        notes: Warnings so far.

    Raises:
        ClusterError: A node has no route to a pinned address, or shares it.
        RankUnreachableError: The probe found nodes that cannot reach each other.
    """
    choices: dict[str, NodeChoice] = {}
    for node in nodes:
        if pin := run.pins.get(node.node_id):
            choices[node.node_id] = node_choice(
                node, interface=pin.interface, address=pin.address, source=pin.source
            )
        else:
            choices[node.node_id] = _by_route(run, node)
    addresses = {key: choice.address for key, choice in choices.items()}
    _require_distinct(run, addresses)
    _require_routes(run, nodes, addresses)
    if probe is not None and probe.unreachable:
        refuse_unreachable(run, [probe])
    said = f"{first_pin(run)}, is on no network that all nodes share; it is reached by route"
    interfaces = {key: choice.interface for key, choice in choices.items()}
    return NetworkDecision(
        label=AS_SET,
        by_node=choices,
        reason=f"as set on {len(run.pins)} of {len(nodes)} nodes",
        warnings=(*notes, said, *cautions(nodes, interfaces, run.names)),
        pinned=frozenset(run.pins),
    )


def _by_route(run: Run, node: NodeNetwork) -> NodeChoice:
    usable = [i for i in node.interfaces if is_usable(node, i, several_hosts=True)]
    found = {}
    for key in sorted(run.pins, key=lambda k: run.names[k]):
        source = node.sources.get(run.pins[key].address)
        out = next((i for i in usable if source is not None and i.own(source)), None)
        if out is None or source is None:
            raise _no_route(run, key, [run.names[node.node_id]])
        found[out.name] = source
    if len(found) > 1:
        raise ClusterError(
            problem=f"Node {run.names[node.node_id]}: the interfaces that other nodes are set to "
            f"use are reached over {' and '.join(sorted(found))}, and a rank has one.",
            way_out="Set network.node_interfaces so that all nodes are on one network.",
        )
    interface, address = next(iter(found.items()))
    return node_choice(
        node, interface=interface, address=address, source=f"routes to {first_pin(run)}"
    )


def _require_distinct(run: Run, addresses: dict[str, str]) -> None:
    clash = shared_address(addresses, run.hosts)
    if clash is None:
        return
    address, first, second = clash
    culprit, other = (first, second) if first in run.pins else (second, first)
    pin = run.pins[culprit]
    raise ClusterError(
        problem=f"Node {run.names[culprit]}: {pin.setting} names {pin.interface}, whose address "
        f"{address} is {run.names[other]}'s as well.",
        way_out=pin.way_out,
    )


def _require_routes(run: Run, nodes: Sequence[NodeNetwork], addresses: dict[str, str]) -> None:
    # Only a node that was asked for routes can be said to lack one.
    apart: dict[str, list[str]] = {}
    for node in nodes:
        for key, address in addresses.items() if node.sources else ():
            if run.hosts[key] != run.hosts[node.node_id] and address not in node.sources:
                pinned, other = (key, node.node_id) if key in run.pins else (node.node_id, key)
                apart.setdefault(pinned, []).append(run.names[other])
    if apart:
        culprit = max(apart, key=lambda key: (len(apart[key]), run.names[key]))
        raise _no_route(run, culprit, apart[culprit])


def _no_route(run: Run, key: str, others: Sequence[str]) -> ClusterError:
    pin = run.pins[key]
    names = ", ".join(sorted(set(others)))
    return ClusterError(
        problem=f"Node {run.names[key]}: {pin.setting} names {pin.interface} ({pin.address}), "
        f"and there is no route between it and {names}.",
        way_out=pin.way_out,
    )
