# SPDX-License-Identifier: Apache-2.0
"""What an interface is, from its name and sysfs. Made up: the sysfs facts."""

from __future__ import annotations

import pytest

from raydist.network.kinds import classify, classify_rdma

_ETHERNET = {"type": "1"}
_PCI = {"type": "1", "device": ""}
_VETH = {"type": "1"}
_BRIDGE = {"type": "1", "bridge": "", "devtype": "bridge"}
_TUN = {"type": "65534", "tun_flags": "0x1001"}


@pytest.mark.parametrize(
    ("name", "facts", "kind"),
    [
        ("lo", {"type": "772"}, "loopback"),
        ("lo", {}, "loopback"),
        ("docker0", _BRIDGE, "container"),
        ("docker_gwbridge", _BRIDGE, "container"),
        ("br-1a2b", _BRIDGE, "container"),
        ("br-3f2a9c8d7e6b", _BRIDGE, "container"),
        ("cni0", _BRIDGE, "container"),
        ("cni-podman0", _BRIDGE, "container"),
        ("podman0", _BRIDGE, "container"),
        ("nerdctl0", _BRIDGE, "container"),
        ("lxdbr0", _BRIDGE, "container"),
        ("lxcbr0", _BRIDGE, "container"),
        ("flannel.1", {"type": "1", "devtype": "vxlan"}, "container"),
        ("cali0123456789a", _VETH, "container"),
        ("vxlan.calico", {"type": "1", "devtype": "vxlan"}, "container"),
        ("tunl0", {"type": "768"}, "container"),
        ("veth9a8b7c6", _VETH, "container"),
        ("cilium_host", _VETH, "container"),
        ("lxc0a1b2c3d", _VETH, "container"),
        ("eni0a1b2c3d4e5", _VETH, "container"),
        ("kube-ipvs0", _ETHERNET, "container"),
        ("nodelocaldns", _ETHERNET, "container"),
        ("virbr0", _BRIDGE, "bridge"),
        ("br0", _BRIDGE, "bridge"),
        ("vmbr0", _BRIDGE, "bridge"),
        ("br-ex", _ETHERNET, "bridge"),
        ("lan", _BRIDGE, "bridge"),
        ("tun0", _TUN, "vpn"),
        ("wg0", {"type": "65534", "devtype": "wireguard"}, "vpn"),
        ("office", {"type": "65534", "devtype": "wireguard"}, "vpn"),
        ("tailscale0", _TUN, "vpn"),
        ("utun3", {}, "vpn"),
        ("ppp0", {"type": "512"}, "vpn"),
        ("ztabcdef12", _ETHERNET | {"tun_flags": "0x1002"}, "vpn"),
        ("bond0", _ETHERNET | {"bonding": "", "devtype": "bond"}, "bond"),
        ("team0", _ETHERNET, "bond"),
        ("bond0.100", _ETHERNET | {"devtype": "vlan"}, "vlan"),
        ("eth0.200", _ETHERNET, "vlan"),
        ("storage", _ETHERNET | {"vlan": ""}, "vlan"),
        ("ib0", {"type": "32", "device": ""}, "infiniband"),
        ("ibp65s0", {"type": "32", "device": ""}, "infiniband"),
        ("fast", {"type": "32", "device": ""}, "infiniband"),
        ("wlan0", _PCI | {"devtype": "wlan"}, "wireless"),
        ("wlp2s0", _PCI | {"wireless": ""}, "wireless"),
        ("ens5", _PCI | {"driver": "ena"}, "physical"),
        ("eno1", _PCI | {"driver": "ixgbe"}, "physical"),
        ("enp7s0f0", _PCI | {"driver": "mlx5_core"}, "physical"),
        ("enP28125s1", _PCI | {"driver": "mlx5_core"}, "physical"),
        ("eth0", _PCI | {"driver": "gve"}, "physical"),
        ("eth0", _VETH, "virtual"),  # of a pod: its own
        ("ens5", _VETH, "virtual"),
        ("eth0", _TUN, "virtual"),  # of a rootless container
        ("eth0", _PCI | {"driver": "hv_netvsc"}, "virtual"),  # of WSL and Azure
        ("eth0", _PCI | {"driver": "virtio_net"}, "virtual"),
        ("ens192", _PCI | {"driver": "vmxnet3"}, "virtual"),
        ("dummy0", _ETHERNET, "virtual"),
    ],
)
def test_kind_of_an_interface(name: str, facts: dict[str, str], kind: str) -> None:
    assert classify(name, facts) == kind


@pytest.mark.parametrize(
    ("name", "driver", "link_layer", "kind"),
    [
        ("mlx5_0", "mlx5_core", "InfiniBand", "infiniband"),
        ("mlx5_bond_0", "mlx5_core", "Ethernet", "roce"),
        ("rdmap0s6", "efa", "Unspecified", "efa"),
        ("rdmap0s6", "", "Unspecified", "efa"),
        ("efa_0", "", "", "efa"),
        ("rdmap65s0", "mlx5_core", "Ethernet", "roce"),
    ],
)
def test_kind_of_an_rdma_device(name: str, driver: str, link_layer: str, kind: str) -> None:
    assert classify_rdma(name, driver=driver, link_layer=link_layer) == kind
