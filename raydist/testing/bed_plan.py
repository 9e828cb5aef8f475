# SPDX-License-Identifier: Apache-2.0
"""Names, addresses and interfaces of a local cluster's nodes. Pure; nothing is made here."""

from __future__ import annotations

import ipaddress
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Network = Literal["management", "data"]
HostName = Literal["management", "loopback", "nothing"]
NETWORKS: tuple[Network, ...] = ("management", "data")

_DIGITS = string.digits + string.ascii_lowercase
# As clouds and distributions name them; neighbours differ.
_INTERFACES = {
    "management": ("eth0", "eno1", "mgmt0", "enp1s0", "em1"),
    "data": ("ens5", "enp7s0", "ens6f0", "eth1", "enp3s0f1", "p2p1", "ens8np0"),
}
_BED = re.compile(r"rd([0-2][0-9a-z]{4})[0-9a-z]{2}")
_RANK = re.compile(r"^rank (\d+): (\S+) \(pid (\d+)\)", re.MULTILINE)


def bed_name(*, owner_pid: int, number: int) -> str:
    """Return a bed's name, nine characters that carry its owner's process id.

    Args:
        owner_pid: Process that is to end the bed, at most 4,194,304 as Linux has it.
        number: Tells one owner's beds apart; the last two base-36 digits count.
    """
    return f"rd{_base36(owner_pid, 5)}{_base36(number % 36**2, 2)}"


def owner_of(name: str) -> int | None:
    """Return the owner's process id out of a bed's name or a namespace's, None out of another's."""
    found = _BED.fullmatch(name.partition("-")[0])
    return int(found[1], 36) if found else None


def _base36(value: int, width: int) -> str:
    digits = ""
    for _ in range(width):
        value, digit = divmod(value, 36)
        digits = _DIGITS[digit] + digits
    return digits


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A node's place in one network.

    Fields:
        interface: Its name inside the node.
        port: Name of the other end, inside the switch.
        address: Without prefix length.
        prefix: Length of the network's prefix in bits.
        rate_mbps: Of both directions, None for what the machine can do.
    """

    network: Network
    interface: str
    port: str
    address: str
    prefix: int
    rate_mbps: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlan:
    """One node: what it is called and where it is connected."""

    number: int
    bed: str
    links: tuple[Link, ...]

    @property
    def host(self) -> str:
        """Host name, and name of the network namespace."""
        return f"{self.bed}-n{self.number}"

    def find_link(self, network: Network) -> Link | None:
        """Return its link to that network, None when it has none."""
        return next((link for link in self.links if link.network == network), None)

    @property
    def address(self) -> str:
        """Its address in the management network."""
        return self.links[0].address


@dataclass(frozen=True, kw_only=True, slots=True)
class BedPlan:
    """The two networks of a bed.

    Fields:
        seed: Chooses the address ranges.
    """

    name: str
    seed: int
    ip_version: Literal[4, 6] = 4
    management_rate_mbps: float | None = 100.0

    @property
    def switch(self) -> str:
        """Name of the namespace that holds both bridges."""
        return f"{self.name}-sw"

    def subnet(self, network: Network) -> str:
        """Return a network's range: a /24 of 10/8, or a /64 of fd00::/8."""
        index = NETWORKS.index(network)
        if self.ip_version == 6:
            return f"fd{self.seed % 256:02x}:{self.seed >> 8 & 0xFFFF:x}:{index + 1}::/64"
        # The third byte is even for management and odd for data: the two never meet.
        second, third = 64 + self.seed % 128, 2 * (self.seed >> 8 & 0x7F) + index
        return f"10.{second}.{third}.0/24"

    def node(self, number: int, *, has_data_network: bool = True) -> NodePlan:
        """Return the plan of node ``number``, counted from 1."""
        networks = NETWORKS if has_data_network else NETWORKS[:1]
        return NodePlan(
            number=number, bed=self.name, links=tuple(self._link(n, number) for n in networks)
        )

    def _link(self, network: Network, number: int) -> Link:
        names = _INTERFACES[network]
        subnet = ipaddress.ip_network(self.subnet(network))
        return Link(
            network=network,
            interface=names[(number - 1) % len(names)],
            port=f"{network}-{number}"[:15],
            address=str(subnet[number + 10]),
            prefix=subnet.prefixlen,
            rate_mbps=self.management_rate_mbps if network == "management" else None,
        )


def hosts_file(nodes: Sequence[NodePlan], own: NodePlan, *, own_name: HostName) -> str:
    """Return a node's /etc/hosts.

    Args:
        nodes: All of the cluster, by their management addresses.
        own: The node whose file it is.
        own_name: What its own host name resolves to; `loopback` is what Debian writes.
    """
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
    for node in nodes:
        if node.number != own.number or own_name == "management":
            lines.append(f"{node.address} {node.host}")
        elif own_name == "loopback":
            lines.append(f"127.0.1.1 {node.host}")
    return "\n".join(lines) + "\n"


def ranks_in(text: str) -> dict[int, tuple[str, int]]:
    """Return host and process id by rank, as a run's own lines give them; the last attempt's."""
    return {int(rank): (host, int(pid)) for rank, host, pid in _RANK.findall(text)}
