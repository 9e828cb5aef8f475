# SPDX-License-Identifier: Apache-2.0
"""Interface sets as they are found on real machines, with made-up addresses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raydist.network import Interface, NodeNetwork, RdmaDevice
from raydist.network.kinds import classify

LO = Interface(name="lo", addresses=("127.0.0.1/8", "::1/128"), kind="loopback", mtu=65536)
DOCKER = Interface(name="docker0", addresses=("172.17.0.1/16",), kind="container")
VIRBR = Interface(name="virbr0", addresses=("192.168.122.1/24",), kind="bridge")

_PCI = {"type": "1", "device": ""}


def nic(name: str, *addresses: str, mbps: int | None = None, **fields: Any) -> Interface:
    """A network card of its own, unless its name says otherwise."""
    kind = fields.pop("kind", None) or classify(name, _PCI)
    return Interface(name=name, addresses=addresses, speed_mbps=mbps, kind=kind, **fields)


def node(name: str, address: str, *interfaces: Interface, **fields: Any) -> NodeNetwork:
    fields.setdefault("node_id", f"id-{name}")
    return NodeNetwork(node=name, address=address, interfaces=(LO, *interfaces), **fields)


def routed(one: NodeNetwork, *others: NodeNetwork, via: str) -> NodeNetwork:
    """Give ``one`` a route to every address of the others, by way of its interface ``via``."""
    out = one.interface(via)
    assert out is not None
    return replace(
        one, sources={ip: out.ips[0] for o in others for i in o.interfaces for ip in i.ips}
    )


def numbered(count: int, build: Callable[[int], NodeNetwork]) -> list[NodeNetwork]:
    return [build(i) for i in range(1, count + 1)]


def _k8s_host(i: int) -> NodeNetwork:
    return node(
        f"n{i}",
        f"10.0.0.{i}",
        nic("ens5", f"10.0.0.{i}/24", mbps=25_000),
        DOCKER,
        nic("cni0", f"10.244.{i}.1/24", mbps=10_000),
        nic("flannel.1", f"10.244.{i}.0/32"),
        nic(f"cali{i}23456789ab", "169.254.1.1/32", mbps=10_000),
        nic("kube-ipvs0", "10.96.0.1/32", "10.96.0.10/32"),
        nic("nodelocaldns", "169.254.20.10/32"),
    )


def _gcp_a3(i: int) -> NodeNetwork:
    cards = [nic(f"eth{k}", f"10.{k}.0.{i}/32", mbps=200_000) for k in range(9)]
    sources = {f"10.{k}.0.{j}": f"10.{k}.0.{i}" for k in range(9) for j in (1, 2) if j != i}
    return node(f"n{i}", f"10.0.0.{i}", *cards, DOCKER, sources=sources)


def _azure_nd(i: int) -> NodeNetwork:
    return node(
        f"n{i}",
        f"10.0.0.{i}",
        nic("eth0", f"10.0.0.{i}/24", mbps=100_000, kind="virtual"),
        nic("ib0", f"172.16.1.{i}/16", mbps=200_000, mtu=2044),
        nic("enP28125s1", mbps=100_000),
        DOCKER,
        rdma=(
            RdmaDevice(name="mlx5_an0", kind="roce", interface="enP28125s1", speed_mbps=100_000),
            *(
                RdmaDevice(name=f"mlx5_ib{k}", kind="infiniband", speed_mbps=200_000)
                for k in range(8)
            ),
        ),
    )


P4D = numbered(
    2,
    lambda i: node(
        f"n{i}",
        f"10.0.0.{i}",
        *(nic(f"ens{32 * (k + 1)}", f"10.0.0.{i + 16 * k}/20", mtu=9001) for k in range(4)),
        DOCKER,
        rdma=tuple(RdmaDevice(name=f"rdmap{k}s27", kind="efa") for k in range(4)),
    ),
)
P5 = numbered(
    2,
    lambda i: node(
        f"n{i}",
        f"10.0.{i}.7",  # two subnets: availability zones
        nic("enp71s0", f"10.0.{i}.7/24", mtu=9001),
        *(nic(f"enp{100 + k}s0") for k in range(3)),
        rdma=tuple(RdmaDevice(name=f"rdmap{k}s0", kind="efa") for k in range(32)),
    ),
)
GCP_A3 = numbered(2, _gcp_a3)
AZURE_ND = numbered(2, _azure_nd)
BONDS = numbered(
    3,
    lambda i: node(
        f"n{i}",
        f"10.0.0.{i}",
        nic("eno1", mbps=1000),
        nic("bond0", mbps=50_000),
        nic("bond0.100", f"10.0.0.{i}/24", mbps=50_000),
        nic("bond0.200", f"10.20.0.{i}/24", mbps=50_000),
        nic("bond1", f"10.30.0.{i}/24", mbps=200_000),
    ),
)
POD = numbered(
    3,
    lambda i: node(
        f"worker-{i}", f"10.244.{i}.5", nic("eth0", f"10.244.{i}.5/24", kind="virtual", mbps=10_000)
    ),
)
HOST_NETWORK = numbered(2, _k8s_host)
WSL = numbered(
    2,
    lambda i: node(
        f"n{i}", f"192.168.1.{i}", nic("eth0", f"192.168.1.{i}/24", kind="virtual", mbps=10_000)
    ),
)
LAPTOPS = numbered(
    2,
    lambda i: node(
        f"n{i}",
        f"192.168.1.{i}",
        nic("wlp2s0", f"192.168.1.{i}/24"),
        nic("tun0", f"10.8.0.{i}/24"),
        nic("br-1a2b", "172.18.0.1/16", mbps=10_000),
        DOCKER,
        VIRBR,
    ),
)
WIRELESS = numbered(
    2, lambda i: node(f"n{i}", f"10.0.0.{i}", nic("wlp2s0", f"10.0.0.{i}/24"), DOCKER)
)
UNLIKE_NAMES = [
    node("n1", "10.0.0.1", nic("ens5", "10.0.0.1/24")),
    node("n2", "10.0.0.2", nic("eno1", "10.0.0.2/24")),
]
SIX = numbered(
    2,
    lambda i: node(
        f"n{i}", f"2001:DB8::{i}", nic("eth0", f"2001:db8::{i}/64", f"fe80::{i}/64", mbps=10_000)
    ),
)
DUAL_STACK = numbered(
    2,
    lambda i: node(
        f"n{i}", f"10.0.0.{i}", nic("eth0", f"10.0.0.{i}/24", f"fd00::{i}/64", mbps=10_000)
    ),
)
TAILNET = numbered(
    2,
    lambda i: node(
        f"n{i}",
        f"100.64.0.{i}",
        nic("eth0", f"192.168.{i}.9/24", mbps=1000),
        nic("tailscale0", f"100.64.0.{i}/32"),
        DOCKER,
    ),
)
PROXMOX = numbered(
    2, lambda i: node(f"n{i}", f"10.0.0.{i}", nic("vmbr0", f"10.0.0.{i}/24"), nic("eno1"))
)
VAGRANT = numbered(
    2,
    lambda i: node(
        f"n{i}",
        f"192.168.56.{i}",
        nic("eth0", "10.0.2.15/24", mbps=100_000),  # every machine's, behind its own NAT
        nic("eth1", f"192.168.56.{i}/24", mbps=1000),
    ),
)
ONE_HOST = [
    node("n1", "10.0.0.1", nic("eth0", "10.0.0.1/24"), DOCKER, node_id=f"id-{k}") for k in "ab"
]


def two_networks(i: int, **fields: Any) -> NodeNetwork:
    """A node with a management and a data network, whose names differ between nodes."""
    names = ("eth0", "ens5") if i % 2 else ("eno1", "enp7s0")
    return node(
        f"n{i}",
        f"10.10.0.{i}",
        nic(names[0], f"10.10.0.{i}/24", kind=fields.pop("kind", None), mbps=1000),
        nic(names[1], f"10.20.0.{i}/24", kind=fields.pop("data_kind", None), mbps=100_000),
        DOCKER,
        VIRBR,
        **fields,
    )


TWO_NETWORKS = numbered(3, two_networks)
MACHINES = {
    "p4d": P4D, "p5": P5, "gcp_a3": GCP_A3, "azure_nd": AZURE_ND, "bonds": BONDS, "pod": POD,
    "host_network": HOST_NETWORK, "wsl": WSL, "laptops": LAPTOPS, "wireless": WIRELESS,
    "unlike_names": UNLIKE_NAMES, "six": SIX, "dual_stack": DUAL_STACK, "tailnet": TAILNET,
    "proxmox": PROXMOX, "vagrant": VAGRANT, "two_networks": TWO_NETWORKS, "one_host": ONE_HOST,
}  # fmt: skip
