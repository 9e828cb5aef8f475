# SPDX-License-Identifier: Apache-2.0
"""What is broken on the networks that nodes share, and on which node. Pure."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raydist.network.decision import NetworkProbe
from raydist.network.facts import NodeNetwork

SLOW_FRACTION = 0.2
"""Of the fastest pair measured at the same time; on a busy machine healthy ones differ by less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkFault:
    """A node that is cut off from a network which the others use.

    Fields:
        label: The network.
        nodes: Names of the nodes at fault.
        what: One clause.
        is_slow: Whether it works, but slowly.
    """

    label: str
    nodes: tuple[str, ...]
    what: str
    is_slow: bool = False


def network_faults(
    nodes: Sequence[NodeNetwork], probes: Sequence[NetworkProbe]
) -> list[NetworkFault]:
    """Return links that are down where most have theirs up, nodes that are silent or slow."""
    return [*_down(nodes), *_silent(nodes, probes), *_slow(nodes, probes)]


def _down(nodes: Sequence[NodeNetwork]) -> list[NetworkFault]:
    up: Counter[str] = Counter()
    down: dict[str, list[tuple[str, str]]] = {}
    for node in nodes:
        of_node = set()
        for interface in node.interfaces:
            if interface.kind in ("loopback", "container", "bridge", "vpn"):
                continue
            for entry in map(ipaddress.ip_interface, interface.addresses):
                if entry.is_link_local or entry.network.prefixlen == entry.max_prefixlen:
                    continue
                if interface.is_up:
                    of_node.add(str(entry.network))
                else:
                    down.setdefault(str(entry.network), []).append((node.node, interface.name))
        up.update(of_node)
    return [
        NetworkFault(
            label=label,
            nodes=tuple(node for node, _ in places),
            what=f"{', '.join(f'{name} of {node}' for node, name in places)} is down, and "
            f"{up[label]} other nodes are up on {label}",
        )
        for label, places in down.items()
        if up[label] > len(nodes) / 2
    ]


def _silent(nodes: Sequence[NodeNetwork], probes: Sequence[NetworkProbe]) -> list[NetworkFault]:
    names = {node.node_id: node.node for node in nodes}
    faults = []
    for probe in probes:
        blamed = blame(probe.unreachable)
        if blamed:
            faults.append(
                NetworkFault(
                    label=probe.label,
                    nodes=tuple(names[node] for node in blamed),
                    what=f"on {probe.label}, {_pairs(probe.unreachable, names)}",
                )
            )
    return faults


def _slow(nodes: Sequence[NodeNetwork], probes: Sequence[NetworkProbe]) -> list[NetworkFault]:
    names = {node.node_id: node.node for node in nodes}
    faults = []
    for probe in probes:
        # Two Ray nodes on one host reach each other without a wire.
        rates = {p: r for p, r in probe.rates_mbps.items() if names[p[0]] != names[p[1]]}
        fastest = max(rates.values(), default=0.0)
        slow = {p: r for p, r in rates.items() if r < SLOW_FRACTION * fastest}
        blamed = blame(list(slow))
        if blamed:
            said = ", ".join(
                f"{names[a]} to {names[b]} {rate:,.0f} Mb/s" for (a, b), rate in slow.items()
            )
            faults.append(
                NetworkFault(
                    label=probe.label,
                    nodes=tuple(names[node] for node in blamed),
                    what=f"on {probe.label}, {said}, where others reach {fastest:,.0f}",
                    is_slow=True,
                )
            )
    return faults


def blame(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return few nodes that explain all unreachable pairs, the one with most partners first.

    Of a pair that stands alone both ends are named: which it is cannot be told.
    """
    left = {frozenset(pair) for pair in pairs if pair[0] != pair[1]}
    blamed: list[str] = []
    while left:
        partners = Counter(node for pair in left for node in pair)
        worst = min(partners, key=lambda node: (-partners[node], node))
        ends = sorted(next(pair for pair in left if worst in pair))
        blamed += [worst] if partners[worst] > 1 else ends
        left = {pair for pair in left if not pair & set(blamed)}
    return blamed


def _pairs(pairs: Sequence[tuple[str, str]], names: Mapping[str, str]) -> str:
    shown = [f"{names[a]} does not reach {names[b]}" for a, b in pairs[:4]]
    more = f" and {len(pairs) - 4} more" if len(pairs) > 4 else ""
    return ", ".join(shown) + more
