# SPDX-License-Identifier: Apache-2.0
"""What an interface is and where it leads, from its name and what sysfs says. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from raydist.network.facts import InterfaceKind, RdmaKind

# A veth alone says nothing: it is a container's end on the host and a pod's own eth0 inside.
_CONTAINER = re.compile(
    r"docker\d|docker_gwbridge$|br-[0-9a-f]{4,}$|cni|flannel|cali[0-9a-f]|vxlan\.calico$|tunl\d"
    r"|veth|lxc|lxdbr|incusbr|cilium_|nerdctl|podman|kube-|nodelocaldns$|weave$|antrea-"
    r"|ovn-k8s-|genev_sys_|vxlan_sys_|azv[0-9a-f]|eni[0-9a-f]{11}$"
)
_OWN = re.compile(r"(eth\d|en[opsxP]\d|enP|em\d|net\d)")
_VPN = re.compile(
    r"tun\d|tap\d|wg|tailscale|utun|ppp|zt|ipsec|vti|nebula|nordlynx|proton|cscotun|gpd\d"
)
_BRIDGE = re.compile(r"br\d|br-|vmbr|virbr|xenbr|ovsbr|ovs-system$")
_VLAN = re.compile(r"vlan\d|.+\.\d+$")

_ARPHRD_INFINIBAND, _ARPHRD_LOOPBACK = "32", "772"
_ARPHRD_TUNNELS = frozenset({"512", "768", "769", "776", "778", "823", "65534"})
_PARAVIRTUAL = frozenset(
    {"virtio_net", "vmxnet3", "hv_netvsc", "vif", "xen_netfront", "veth", "netkit"}
)


def classify(name: str, facts: Mapping[str, str]) -> InterfaceKind:
    """Return what the interface is.

    Args:
        name: Its name, as `ens5`.
        facts: By file name under its sysfs folder; a folder or link that exists has an entry
            whose text is empty. Read are `type`, `device`, `bonding`, `bridge`, `wireless`,
            `tun_flags`, and of what is not a file of that folder `devtype` (from uevent), `driver`
            (of the device) and `vlan` (it is listed under /proc/net/vlan).
    """
    link = facts.get("type", "")
    devtype = facts.get("devtype", "")
    if link == _ARPHRD_LOOPBACK or name == "lo":
        return "loopback"
    if _CONTAINER.match(name):
        return "container"
    is_tunnel = "tun_flags" in facts or devtype == "wireguard" or link in _ARPHRD_TUNNELS
    if _VPN.match(name) or (is_tunnel and not _OWN.match(name)):
        return "vpn"
    rules: tuple[tuple[InterfaceKind, bool], ...] = (
        ("infiniband", link == _ARPHRD_INFINIBAND or bool(re.match(r"ib[ps]?\d", name))),
        ("vlan", devtype == "vlan" or "vlan" in facts or bool(_VLAN.match(name))),
        ("wireless", devtype == "wlan" or "wireless" in facts or name.startswith("wl")),
        ("bond", devtype == "bond" or "bonding" in facts or bool(re.match(r"bond|team\d", name))),
        ("bridge", devtype == "bridge" or "bridge" in facts or bool(_BRIDGE.match(name))),
        ("physical", "device" in facts and facts.get("driver") not in _PARAVIRTUAL),
    )
    for kind, holds in rules:
        if holds:
            return kind
    return "virtual"


def classify_rdma(name: str, *, driver: str, link_layer: str) -> RdmaKind:
    """Return what an RDMA device is, from its name, its driver and a port's link_layer."""
    if driver == "efa" or name.startswith("efa_"):
        return "efa"
    if link_layer == "InfiniBand":
        return "infiniband"
    # Elastic Fabric Adapters are renamed rdmap<bus>s<slot>, as others are; their ports state none.
    return "efa" if link_layer != "Ethernet" and name.startswith("rdmap") else "roce"
