# SPDX-License-Identifier: Apache-2.0
"""What the site or the configuration has already decided for a node, and whether it can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from raydist.errors import ClusterError
from raydist.network.candidates import preferred_address
from raydist.network.facts import Interface, NodeNetwork

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """An interface that is decided for a node.

    Fields:
        interface: The one that gives the address.
        address: To publish for the node.
        source: For the line of a rank.
        setting: What names the interface, for messages.
        way_out: How to have it otherwise.
        count: Interfaces the setting names; gloo takes several.
    """

    interface: str
    address: str
    source: str
    setting: str
    way_out: str
    count: int = 1


def nccl_takes(value: str, name: str) -> bool:
    """Whether NCCL would use interface ``name`` under NCCL_SOCKET_IFNAME=``value``.

    A list of prefixes; a leading `=` makes them exact names, a leading `^` excludes them. Both
    count once, for the whole list.

    Source: NCCL user guide, "Environment Variables", NCCL_SOCKET_IFNAME.
    """
    excludes = value.startswith("^")
    value = value[1:] if excludes else value
    is_exact = value.startswith("=")
    value = value[1:] if is_exact else value
    entries = [entry.partition(":")[0] for entry in value.split(",") if entry]
    if not entries:
        return not excludes
    matches = any(name == e if is_exact else name.startswith(e) for e in entries)
    return matches != excludes


def pin_of(
    node: NodeNetwork,
    *,
    name: str,
    num_hosts: int,
    interface: str | None,
    node_interfaces: Mapping[str, str],
    heeds_nccl: bool = True,
) -> Pin | None:
    """Return what is decided for ``node``, None where nothing is.

    GLOO_SOCKET_IFNAME of the node comes first, then network.node_interfaces, then
    network.interface, then, where ``heeds_nccl``, an NCCL_SOCKET_IFNAME that names one interface
    of the node.

    Raises:
        ClusterError: It names what is no interface with an address there, or one that other
            machines cannot reach.
    """
    preset = node.environment.get(GLOO, "")
    keys = (node.node, node.address, node.node_id)
    key = next((k for k in keys if k in node_interfaces), None)
    if preset:
        names = preset.split(",")
        source, setting = f"kept from {GLOO}", f"{GLOO} of the node"
        way_out = f"Unset {GLOO} on {name}, or name exactly one existing interface there; "
        way_out += "exclusions with ^ are NCCL's syntax and gloo takes none."
    elif key is not None:
        names = [node_interfaces[key]]
        source = setting = f"network.node_interfaces[{key}]"
        way_out = f"Name exactly one existing interface of {name} in network.node_interfaces."
    elif interface is not None:
        names = [interface]
        source = setting = "network.interface"
        way_out = "Name exactly one existing interface; where nodes name theirs differently, set "
        way_out += "network.node_interfaces."
    else:
        followed = _one_of_nccl(node) if heeds_nccl else None
        if followed is None:
            return None
        names = [followed.name]
        source, setting = f"follows {NCCL}", f"{NCCL} of the node"
        way_out = f"Unset {NCCL} on {name}, or set network.node_interfaces[{node.node}]."
    chosen = [
        _check(node, wanted, name=name, num_hosts=num_hosts, setting=setting, way_out=way_out)
        for wanted in names
    ]
    return Pin(
        interface=chosen[0].name,
        address=preferred_address(node, chosen[0]),
        source=source,
        setting=setting,
        way_out=way_out,
        count=len(chosen),
    )


def under_nccl_filter(node: NodeNetwork) -> NodeNetwork:
    """Return ``node`` with only the interfaces that its NCCL_SOCKET_IFNAME leaves."""
    value = node.environment.get(NCCL, "")
    if not value:
        return node
    return replace(node, interfaces=tuple(i for i in node.interfaces if nccl_takes(value, i.name)))


def _one_of_nccl(node: NodeNetwork) -> Interface | None:
    value = node.environment.get(NCCL, "").removeprefix("=").partition(":")[0]
    found = node.interface(value)
    return found if found is not None and found.addresses else None


def _check(
    node: NodeNetwork, wanted: str, *, name: str, num_hosts: int, setting: str, way_out: str
) -> Interface:
    found = node.interface(wanted)
    if found is None or not found.addresses:
        has = ", ".join(sorted(i.name for i in node.interfaces if i.addresses)) or "none"
        raise ClusterError(
            problem=f"Node {name}: {setting} names {wanted!r}, which is not an interface with an "
            f"address there (it has {has}).",
            way_out=way_out,
        )
    trouble = None
    if not found.is_up:
        trouble = "is down"
    elif num_hosts > 1 and found.is_loopback:
        trouble = f"is loopback, and ranks sit on {num_hosts} nodes"
    elif num_hosts > 1 and found.kind == "container":
        trouble = "leads to containers on that host only"
    elif num_hosts > 1 and all(ip.lower().startswith("fe80:") for ip in found.ips):
        trouble = "has a link-local address only"
    if trouble:
        raise ClusterError(
            problem=f"Node {name}: {setting} names {wanted}, and interface {wanted} {trouble}.",
            way_out=way_out,
        )
    return found
