# SPDX-License-Identifier: Apache-2.0
"""Which networks every node is on: a pure function of what the nodes say of themselves."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raydist.network.facts import Interface, NodeNetwork

CLUSTER_LABEL = "the cluster's addresses"

_NO_HONEST_SPEED = frozenset({"virtual", "vpn", "bridge", "wireless"})


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateNetwork:
    """A network that every node has a usable interface on.

    Fields:
        label: Its subnet; for routed ones what they have in common. One label, one network.
        addresses: Node id to that node's address in it.
        interfaces: Node id to the interface that has the address.
        speed_mbps: Lowest stated speed; None where one states none that can be believed.
        carries_cluster: Whether these are the interfaces by which the cluster is connected.
    """

    label: str
    addresses: Mapping[str, str]
    interfaces: Mapping[str, str]
    speed_mbps: int | None
    carries_cluster: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """The candidates, and for each network that came close why it is none."""

    candidates: tuple[CandidateNetwork, ...]
    rejected: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Place:
    interface: Interface
    address: str


@dataclass(slots=True)
class _Found:
    nodes: Sequence[NodeNetwork]
    names: Mapping[str, str]
    hosts: Mapping[str, int]
    candidates: dict[tuple[tuple[str, str], ...], CandidateNetwork] = field(default_factory=dict)
    rejected: list[tuple[str, str]] = field(default_factory=list)

    def add(self, label: str, places: Mapping[str, _Place]) -> None:
        if clash := shared_address({k: p.address for k, p in places.items()}, self.hosts):
            address, first, second = clash
            why = f"{self.names[first]} and {self.names[second]} both have {address} there"
            self.rejected.append((label, why))
            return
        interfaces = {key: place.interface.name for key, place in sorted(places.items())}
        speeds = [_believable_mbps(place.interface) for place in places.values()]
        candidate = CandidateNetwork(
            label=label,
            addresses={key: place.address for key, place in sorted(places.items())},
            interfaces=interfaces,
            speed_mbps=None if None in speeds else min(s for s in speeds if s is not None),
            carries_cluster=all(
                places[n.node_id].interface.own(n.address) is not None for n in self.nodes
            ),
        )
        self.candidates.setdefault(tuple(interfaces.items()), candidate)


def candidate_networks(nodes: Sequence[NodeNetwork]) -> list[CandidateNetwork]:
    """Return the networks that all nodes have a usable interface on, the cluster's own first."""
    return list(survey(nodes).candidates)


def survey(nodes: Sequence[NodeNetwork], *, pinned: Mapping[str, str] | None = None) -> Survey:
    """Return the candidate networks and why others are none.

    Interface sets are counted once; of two subnets on the same interfaces, the one of the family
    by which the cluster is connected stands for them.

    Args:
        nodes: Of one run; their order does not matter.
        pinned: Node id to the one interface that it may use.
    """
    pinned = pinned or {}
    nodes = sorted(nodes, key=lambda n: n.node_id)
    hosts = hosts_of(nodes)
    several = len(set(hosts.values())) > 1
    usable = {
        n.node_id: sorted(
            (i for i in n.interfaces if _may_use(n, i, several, pinned.get(n.node_id))),
            key=lambda i: i.name,
        )
        for n in nodes
    }
    found = _Found(nodes, display_names(nodes), hosts)
    _add_cluster(found, usable)
    _add_subnets(found, usable)
    _add_routed(found, usable)
    return Survey(candidates=tuple(found.candidates.values()), rejected=tuple(found.rejected))


def is_usable(node: NodeNetwork, interface: Interface, *, several_hosts: bool) -> bool:
    """Whether other nodes may reach ``node`` through it, as far as its own facts tell.

    A VPN, and a bridge that a host routes through, count where they have the node's cluster
    address; what leads to containers never does.
    """
    if not interface.is_up or not interface.addresses:
        return False
    if not several_hosts:
        return True
    if interface.is_loopback or interface.kind == "container":
        return False
    return interface.kind not in {"bridge", "vpn"} or interface.own(node.address) is not None


def preferred_address(node: NodeNetwork, interface: Interface) -> str:
    """Return the address to publish for an interface: the cluster's, else the widest known one.

    Source: gloo and NCCL both take an interface's first address of a family, IPv4 before IPv6.
    """

    def rank(text: str) -> tuple[bool, bool, bool]:
        ip = ipaddress.ip_address(text)
        return ip.is_loopback, ip.is_link_local, ip.version != _version(node.address)

    return interface.own(node.address) or min(interface.ips, key=rank)


def hosts_of(nodes: Sequence[NodeNetwork]) -> dict[str, int]:
    """Return the machine that each node id is on, numbered; two Ray nodes can share one.

    One machine is told from another by its name and all of its addresses.
    """
    numbers: dict[tuple[str, frozenset[str]], int] = {}
    found = {}
    for node in nodes:
        own = (i for i in node.interfaces if i.kind != "container")
        machine = node.node, frozenset(a for i in own for a in i.addresses)
        found[node.node_id] = numbers.setdefault(machine, len(numbers))
    return found


def display_names(nodes: Sequence[NodeNetwork]) -> dict[str, str]:
    """Return a name for each node id: the host name, with the address where that is shared."""
    counts = Counter(n.node for n in nodes)
    return {n.node_id: n.node if counts[n.node] == 1 else f"{n.node} ({n.address})" for n in nodes}


def shared_address(
    addresses: Mapping[str, str], hosts: Mapping[str, int]
) -> tuple[str, str, str] | None:
    """Return an address that two machines have, with their node ids; None without one."""
    seen: dict[str, str] = {}
    for node_id, address in sorted(addresses.items()):
        other = seen.setdefault(address, node_id)
        if hosts[other] != hosts[node_id]:
            return address, other, node_id
    return None


def _may_use(node: NodeNetwork, interface: Interface, several: bool, pin: str | None) -> bool:
    if pin is not None:
        return interface.name == pin
    return is_usable(node, interface, several_hosts=several)


def _add_cluster(found: _Found, usable: Mapping[str, Sequence[Interface]]) -> None:
    places: dict[str, _Place] = {}
    subnets = set()
    for node in found.nodes:
        for interface in usable[node.node_id]:
            if address := interface.own(node.address):
                places[node.node_id] = _Place(interface, address)
                subnets.add(str(_entry(interface, address).network))
                break
    if len(places) == len(found.nodes):
        found.add(subnets.pop() if len(subnets) == 1 else CLUSTER_LABEL, places)


def _add_subnets(found: _Found, usable: Mapping[str, Sequence[Interface]]) -> None:
    by_subnet: dict[str, dict[str, _Place]] = {}
    cluster_version = _version(found.nodes[0].address)
    for node in found.nodes:
        # The cluster's interface first, then the fastest: a node may have several in one subnet.
        order = sorted(
            usable[node.node_id],
            key=lambda i: (i.own(node.address) is None, -(_believable_mbps(i) or 0), i.name),
        )
        for interface in order:
            entries = [ipaddress.ip_interface(a) for a in interface.addresses]
            for entry in sorted(entries, key=lambda e: interface.own(node.address) != str(e.ip)):
                is_own = entry.is_link_local or entry.is_loopback
                if is_own or entry.network.prefixlen == entry.max_prefixlen:
                    continue
                places = by_subnet.setdefault(str(entry.network), {})
                places.setdefault(node.node_id, _Place(interface, str(entry.ip)))
    for label in sorted(by_subnet, key=lambda s: (_version(s) != cluster_version, s)):
        places = by_subnet[label]
        missing = [found.names[n.node_id] for n in found.nodes if n.node_id not in places]
        if not missing:
            found.add(label, places)
        elif len(places) > 1:
            found.rejected.append((label, f"{_some(missing)} not on it"))


def _add_routed(found: _Found, usable: Mapping[str, Sequence[Interface]]) -> None:
    by_name = {key: {i.name: i for i in interfaces} for key, interfaces in usable.items()}
    shared = set.intersection(*(set(names) for names in by_name.values()))
    for name in sorted(shared):
        if tuple((n.node_id, name) for n in found.nodes) in found.candidates:
            continue
        places = {
            n.node_id: _Place(
                by_name[n.node_id][name], preferred_address(n, by_name[n.node_id][name])
            )
            for n in found.nodes
        }
        if all(
            node.sources.get(places[peer.node_id].address) in places[node.node_id].interface.ips
            for node in found.nodes
            for peer in found.nodes
            if found.hosts[node.node_id] != found.hosts[peer.node_id]
        ):
            found.add(f"{name} (routed)", places)


def _believable_mbps(interface: Interface) -> int | None:
    return None if interface.kind in _NO_HONEST_SPEED else interface.speed_mbps


def _entry(interface: Interface, ip: str) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface:
    entries = map(ipaddress.ip_interface, interface.addresses)
    return next(e for e in entries if e.ip == ipaddress.ip_address(ip))


def _version(address: str) -> int:
    return 6 if ":" in address else 4


def _some(names: Sequence[str]) -> str:
    verb = "is" if len(names) == 1 else "are"
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{shown} {verb}"
