# SPDX-License-Identifier: Apache-2.0
"""A node's network as plain data: what the choice is made from."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

InterfaceKind = Literal[
    "loopback", "physical", "wireless", "bond", "vlan", "infiniband", "virtual", "bridge",
    "container", "vpn",
]  # fmt: skip
RdmaKind = Literal["infiniband", "roce", "efa"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """A network interface of a node.

    Fields:
        addresses: With prefix length, as `10.0.0.5/24`; link-local ones without their zone.
        speed_mbps: As the driver states it, None where it states none. Virtual ones state
            anything.
        kind: `virtual` is a node's own paravirtual or namespaced device; `container` and `bridge`
            lead to containers on this host.
    """

    name: str
    addresses: tuple[str, ...]
    is_up: bool = True
    kind: InterfaceKind = "physical"
    speed_mbps: int | None = None
    mtu: int = 1500

    @property
    def ips(self) -> tuple[str, ...]:
        """Its addresses without prefix lengths."""
        return tuple(address.partition("/")[0] for address in self.addresses)

    def own(self, address: str) -> str | None:
        """Return ``address`` as this interface spells it, None where it is not one of its own.

        Compared as numbers: 2001:DB8::5 and 2001:db8:0::5 are one address.
        """
        try:
            wanted = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return None
        return next((ip for ip in self.ips if ipaddress.ip_address(ip) == wanted), None)

    @property
    def is_loopback(self) -> bool:
        """Whether it reaches only its own node."""
        return self.kind == "loopback" or all(
            ipaddress.ip_address(ip).is_loopback for ip in self.ips
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RdmaDevice:
    """An RDMA device: InfiniBand or RoCE host channel adapter, or an Elastic Fabric Adapter.

    Fields:
        interface: The IP interface on the same port, None without one.
    """

    name: str
    kind: RdmaKind
    port: int = 1
    is_active: bool = True
    interface: str | None = None
    speed_mbps: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeNetwork:
    """All that is known of one node's network.

    Fields:
        node: Its host name, for messages and for network.node_interfaces.
        node_id: Its identity in the cluster; two nodes on one host differ here only.
        address: The address by which the cluster knows it.
        environment: Its NCCL_*, GLOO_*, FI_*, UCX_*, TP_*, MASTER_*, TORCH_NCCL_*, TORCH_FR_* and
            *_PROXY variables.
        sources: For each address of the other nodes, the address this node would send from; an
            address without a route has no entry. Empty when nobody asked.
        resolves_to: What its own host name resolves to, empty when it does not.
    """

    node: str
    node_id: str
    address: str
    interfaces: tuple[Interface, ...]
    rdma: tuple[RdmaDevice, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    resolves_to: tuple[str, ...] = ()

    def interface(self, name: str) -> Interface | None:
        """Return its interface of that name, None without one."""
        return next((i for i in self.interfaces if i.name == name), None)

    @property
    def carrier(self) -> Interface | None:
        """Its interface that has the address by which the cluster knows it, None without one."""
        carrying = [i for i in self.interfaces if i.own(self.address)]
        return min(carrying, key=lambda i: (not i.is_up, i.name), default=None)
