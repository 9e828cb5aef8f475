# SPDX-License-Identifier: Apache-2.0
"""A decision about the network as plain data, and the measurements that go into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raydist.network.facts import NodeNetwork
from raydist.network.presets import Pin

AS_SET = "interfaces as set"
ONE_NODE = "one node"


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkProbe:
    """What was measured on one network.

    Fields:
        label: Of the CandidateNetwork, or AS_SET for interfaces that are decided by settings.
        unreachable: (from, to) node ids where no connection came about.
        slowest_mbps: Of the pairs that were tried, None where none was.
        rates_mbps: Those pairs, (from, to) node ids, all measured at once.
    """

    label: str
    unreachable: tuple[tuple[str, str], ...] = ()
    slowest_mbps: float | None = None
    rates_mbps: Mapping[tuple[str, str], float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeChoice:
    """One node's interface, its address there, and where the choice came from."""

    node: str
    node_id: str
    interface: str
    address: str
    source: str

    @property
    def short_source(self) -> str:
        """``source`` without its figures, which are said once for all nodes."""
        return self.source.partition(" (")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkDecision:
    """The network for every node.

    Fields:
        label: The network's, AS_SET where settings decide and no one network has them all.
        by_node: Node id to choice.
        reason: One clause for the whole of it.
        rejected: Networks that were not taken, each with why.
        warnings: What works but is worth knowing.
        pinned: Node ids whose interface a setting decides.
    """

    label: str
    by_node: Mapping[str, NodeChoice]
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    pinned: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The nodes of one decision, by node id: their names, their machines, what is decided."""

    nodes: Sequence[NodeNetwork]
    names: Mapping[str, str]
    hosts: Mapping[str, int]
    pins: Mapping[str, Pin]


def node_choice(node: NodeNetwork, *, interface: str, address: str, source: str) -> NodeChoice:
    """Return the choice for ``node``."""
    return NodeChoice(
        node=node.node, node_id=node.node_id, interface=interface, address=address, source=source
    )


def first_pin(run: Run) -> str:
    """Return what draws the other nodes: the first pin by name, for messages."""
    key = min(run.pins, key=lambda k: run.names[k])
    pin = run.pins[key]
    return f"{run.names[key]}'s {pin.interface}, from {pin.setting.removesuffix(' of the node')}"
