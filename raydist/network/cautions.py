# SPDX-License-Identifier: Apache-2.0
"""What works but is worth knowing before a run: unequal links, names, RDMA devices. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

from raydist.network.facts import NodeNetwork

_UNEQUAL = 2.0


def cautions(
    nodes: Sequence[NodeNetwork], interfaces: Mapping[str, str], names: Mapping[str, str]
) -> tuple[str, ...]:
    """Return warnings about several machines' choice.

    Args:
        nodes: Of one run.
        interfaces: Node id to the name of the chosen interface.
        names: Node id to the name for messages.
    """
    said = []
    chosen = {n.node_id: n.interface(interfaces[n.node_id]) for n in nodes}
    mtus = {key: i.mtu for key, i in chosen.items() if i is not None}
    if len(set(mtus.values())) > 1:
        said.append(f"MTU differs on the chosen network: {_extremes(mtus, names)}")
    speeds = {
        key: i.speed_mbps
        for key, i in chosen.items()
        if i is not None and i.speed_mbps is not None and i.kind != "virtual"
    }
    if speeds and max(speeds.values()) > _UNEQUAL * min(speeds.values()):
        text = _extremes(speeds, names)
        said.append(f"Stated speed differs on the chosen network: {text} Mb/s")
    rdma = {n.node_id: len([d for d in n.rdma if d.is_active]) for n in nodes}
    if len(set(rdma.values())) > 1:
        said.append(f"Active RDMA devices differ: {_extremes(rdma, names)}")
    to_itself = [names[n.node_id] for n in nodes if _is_loopback(n.resolves_to)]
    if to_itself:
        said.append(
            f"{', '.join(to_itself)}: the host name resolves to loopback; raydist publishes "
            "addresses, other programs may not"
        )
    return tuple(said)


def _extremes(values: Mapping[str, int], names: Mapping[str, str]) -> str:
    low = min(values, key=lambda key: (values[key], names[key]))
    high = max(values, key=lambda key: (values[key], names[key]))
    return f"{names[high]} has {values[high]}, {names[low]} {values[low]}"


def _is_loopback(addresses: Sequence[str]) -> bool:
    return bool(addresses) and all(ipaddress.ip_address(a).is_loopback for a in addresses)
