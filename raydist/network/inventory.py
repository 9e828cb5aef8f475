# SPDX-License-Identifier: Apache-2.0
"""Reads this machine's network: interfaces, RDMA devices, routes, variables. Sends no packet."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raydist.network.facts import Interface, NodeNetwork, RdmaDevice
from raydist.network.kinds import classify, classify_rdma

_PREFIXES = (
    "NCCL_", "GLOO_", "FI_", "UCX_", "TP_", "MASTER_", "TORCH_NCCL_", "TORCH_FR_",
)  # fmt: skip
_PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy", "no_proxy"})
_DISCARD_PORT = 9


def inventory(*, node_id: str, address: str, root: Path = Path("/")) -> NodeNetwork:
    """Return this machine's network, but for its routes.

    Args:
        node_id: Its identity in the cluster.
        address: The address by which the cluster knows it.
        root: Where `sys` and `proc` lie.
    """
    import psutil

    node = socket.gethostname()
    return NodeNetwork(
        node=node,
        node_id=node_id,
        address=address,
        interfaces=read_interfaces(psutil.net_if_addrs(), psutil.net_if_stats(), root=root),
        rdma=read_rdma(root=root),
        environment=network_variables(os.environ),
        resolves_to=_resolve(node),
    )


def read_interfaces(
    addresses: Mapping[str, Sequence[Any]], states: Mapping[str, Any], *, root: Path = Path("/")
) -> tuple[Interface, ...]:
    """Return the interfaces that have an address, or are named in ``states``, by name.

    Args:
        addresses: As psutil.net_if_addrs gives them.
        states: As psutil.net_if_stats gives them.
        root: Where `sys` and `proc` lie.
    """
    found = []
    for name in sorted({*addresses, *states}):
        facts = _sysfs_facts(name, root)
        state = states.get(name)
        found.append(
            Interface(
                name=name,
                addresses=_with_prefix(addresses.get(name, ())),
                # A tunnel or a dummy device states "unknown" while it works.
                is_up=(state is None or state.isup) and facts.get("operstate") != "down",
                kind=classify(name, facts),
                speed_mbps=_positive(facts.get("speed", "")),
                mtu=state.mtu if state is not None else 1500,
            )
        )
    return tuple(found)


def read_rdma(*, root: Path = Path("/")) -> tuple[RdmaDevice, ...]:
    """Return the RDMA devices, one entry a port, by name and port."""
    folder = root / "sys/class/infiniband"
    found = []
    for device in sorted(folder.iterdir()) if folder.is_dir() else ():
        driver = _link_name(device / "device/driver")
        interfaces = sorted(p.name for p in _entries(device / "device/net"))
        for port in sorted(_entries(device / "ports"), key=lambda p: int(p.name)):
            kind = classify_rdma(
                device.name, driver=driver, link_layer=_read(port / "link_layer") or ""
            )
            found.append(
                RdmaDevice(
                    name=device.name,
                    kind=kind,
                    port=int(port.name),
                    is_active=(_read(port / "state") or "").endswith("ACTIVE"),
                    interface=interfaces[0] if interfaces else None,
                    speed_mbps=_rate_mbps(_read(port / "rate") or ""),
                )
            )
    return tuple(found)


def routes(peers: Sequence[str]) -> dict[str, str]:
    """Return the address this machine would send from, for each peer it has a route to."""
    found = {}
    for peer in peers:
        family = socket.AF_INET6 if ":" in peer else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                # Connecting a datagram socket looks up the route and sends nothing.
                probe.connect((peer, _DISCARD_PORT))
                found[peer] = probe.getsockname()[0].partition("%")[0]
        except OSError:
            continue
    return found


def network_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that bear on the network; credentials in proxies are removed."""
    found = {}
    for key, value in environment.items():
        if key.lower() in _PROXIES:
            found[key] = re.sub(r"(^|//)[^/@]*@", r"\1", value)
        elif key.startswith(_PREFIXES):
            found[key] = value
    return found


def _resolve(host: str) -> tuple[str, ...]:
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(sorted({str(answer[4][0]).partition("%")[0] for answer in answers}))


def _with_prefix(entries: Sequence[Any]) -> tuple[str, ...]:
    found = []
    for entry in entries:
        if entry.family not in {socket.AF_INET, socket.AF_INET6}:
            continue
        ip = ipaddress.ip_address(entry.address.partition("%")[0])
        bits = ip.max_prefixlen
        if entry.netmask:
            bits = int(ipaddress.ip_address(entry.netmask)).bit_count()
        found.append(f"{ip}/{bits}")
    return tuple(found)


def _sysfs_facts(name: str, root: Path) -> dict[str, str]:
    folder = root / "sys/class/net" / name
    facts: dict[str, str] = {}
    for file in ("type", "speed", "operstate", "tun_flags"):
        text = _read(folder / file)
        if text is not None:
            facts[file] = text
    for entry in ("device", "bonding", "bridge", "wireless"):
        if (folder / entry).exists():
            facts[entry] = ""
    for line in (_read(folder / "uevent") or "").splitlines():
        if line.startswith("DEVTYPE="):
            facts["devtype"] = line.partition("=")[2]
    if driver := _link_name(folder / "device/driver"):
        facts["driver"] = driver
    if (root / "proc/net/vlan" / name).exists():
        facts["vlan"] = ""
    return facts


def _read(path: Path) -> str | None:
    # The kernel answers EINVAL for a file that a device has no value for, as `speed` of a tunnel.
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _link_name(path: Path) -> str:
    return path.resolve().name if path.exists() else ""


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _positive(text: str) -> int | None:
    value = int(text) if re.fullmatch(r"-?\d+", text) else 0
    # Drivers that do not know say -1, 0 or that number unsigned.
    return value if 0 < value < 2**31 - 1 else None


def _rate_mbps(text: str) -> int | None:
    # "200 Gb/sec (4X HDR)"
    matched = re.match(r"([\d.]+) Gb/sec", text)
    return round(float(matched[1]) * 1000) or None if matched else None
