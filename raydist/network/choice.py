# SPDX-License-Identifier: Apache-2.0
"""Which interface a rank talks over, and the environment that says so. A pure decision."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raydist.errors import ClusterError


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """A network interface of a node and its IP addresses."""

    name: str
    addresses: tuple[str, ...]

    @property
    def is_loopback(self) -> bool:
        """Whether it reaches only its own node."""
        return all(ipaddress.ip_address(a).is_loopback for a in self.addresses)


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkChoice:
    """One rank's interface, its address there, and where the choice came from."""

    interface: str
    address: str
    reason: str


def list_interfaces() -> list[Interface]:
    """Return this node's interfaces that have an address."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    found = []
    for name, entries in psutil.net_if_addrs().items():
        addresses = tuple(e.address.split("%")[0] for e in entries if e.family in families)
        if addresses:
            found.append(Interface(name=name, addresses=addresses))
    return found


def choose_interface(
    interfaces: Sequence[Interface],
    *,
    node: str,
    node_address: str,
    num_nodes: int,
    environment: Mapping[str, str],
    override: str | None,
) -> NetworkChoice:
    """Choose a node's interface: what the site set, else the configuration, else the route.

    Args:
        interfaces: The node's own.
        node: Its name, for messages.
        node_address: The address by which the cluster knows the node.
        num_nodes: Nodes that hold ranks.
        environment: The node's environment; GLOO_SOCKET_IFNAME there is kept.
        override: network.interface.

    Raises:
        ClusterError: The named interface is not there, or is loopback between nodes; or no
            interface carries the node's address.
    """
    by_name = {i.name: i for i in interfaces}
    names = ", ".join(sorted(by_name)) or "none"
    preset = environment.get("GLOO_SOCKET_IFNAME")
    if preset or override:
        name = preset or override or ""
        source = "GLOO_SOCKET_IFNAME of the node" if preset else "network.interface"
        if name not in by_name:
            raise ClusterError(
                problem=f"Node {node}: {source} names {name!r}, which is not an interface with "
                f"an address there (it has {names}).",
                way_out="Name exactly one existing interface; exclusions with ^ are NCCL's "
                "syntax and gloo takes none.",
            )
        chosen = by_name[name]
        reason = f"kept from {source}" if preset else f"from {source}"
    else:
        carrying = [i for i in interfaces if _find(node_address, i.addresses)]
        if not carrying:
            raise ClusterError(
                problem=f"Node {node}: no interface has the node's address {node_address} "
                f"(it has {names}).",
                way_out="Start Ray there with --node-ip-address of an interface, or set "
                "network.interface.",
            )
        chosen = carrying[0]
        reason = f"carries the node's address {node_address}"
    if chosen.is_loopback and num_nodes > 1:
        raise ClusterError(
            problem=f"Node {node}: interface {chosen.name} is loopback, and ranks sit on "
            f"{num_nodes} nodes.",
            way_out="Start Ray there with --node-ip-address of a reachable interface, or set "
            "network.interface.",
        )
    address = _find(node_address, chosen.addresses) or _most_reachable(chosen.addresses)
    return NetworkChoice(interface=chosen.name, address=address, reason=reason)


def _find(address: str, addresses: Sequence[str]) -> str | None:
    # Compared as numbers: 2001:DB8::5 and 2001:db8:0::5 are one address.
    try:
        wanted = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    return next((a for a in addresses if ipaddress.ip_address(a) == wanted), None)


def _most_reachable(addresses: Sequence[str]) -> str:
    def rank(text: str) -> tuple[bool, bool]:
        address = ipaddress.ip_address(text)
        return address.is_loopback, address.is_link_local

    return min(addresses, key=rank)


def network_environment(
    choice: NetworkChoice, *, num_nodes: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that the choice implies, leaving out what the site has set.

    gloo takes one concrete name; NCCL takes `=name` for an exact match, and is left to its own
    choice on a single node.
    """
    implied = {"GLOO_SOCKET_IFNAME": choice.interface}
    if num_nodes > 1:
        implied["NCCL_SOCKET_IFNAME"] = f"={choice.interface}"
    return {key: value for key, value in implied.items() if not environment.get(key)}
