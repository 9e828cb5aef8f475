# SPDX-License-Identifier: Apache-2.0
"""A rank's network under a launcher that tells it only where rank 0 is."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import replace
from typing import Literal

from raydist.config import NetworkConfig
from raydist.errors import ClusterError
from raydist.network import (
    ImpliedEnvironment,
    NodeChoice,
    choose_network,
    inventory,
    network_environment,
    routes,
)
from raydist.world import World


def choose_by_route(
    world: World, network: NetworkConfig, *, master_addr: str, backend: Literal["nccl", "gloo"]
) -> tuple[NodeChoice, ImpliedEnvironment]:
    """Choose the interface that leads to rank 0, unless the site or the configuration names one.

    Args:
        world: This rank's place.
        network: What the configuration says.
        master_addr: MASTER_ADDR as the launcher set it.
        backend: Of the process group.

    Raises:
        ClusterError: MASTER_ADDR does not resolve or leads nowhere; a named interface is not there.
    """
    node = socket.gethostname()
    facts = inventory(node_id=str(world.node_rank), address=_own_address(world, master_addr))
    decision = choose_network(
        [facts],
        interface=network.interface,
        node_interfaces=network.node_interfaces,
        backend=backend,
    )
    choice = decision.by_node[facts.node_id]
    if world.num_nodes > 1 and not decision.pinned:
        choice = replace(choice, source=f"leads to rank 0 at {master_addr}")
    if world.num_nodes > 1 and ipaddress.ip_address(choice.address).is_loopback:
        raise ClusterError(
            problem=f"Node {node}: interface {choice.interface} is loopback, and ranks sit on "
            f"{world.num_nodes} nodes.",
            way_out="Set network.interface, or unset GLOO_SOCKET_IFNAME there.",
        )
    implied = network_environment(
        choice, facts, num_nodes=world.num_nodes, backend=backend, debug=network.debug
    )
    os.environ.update(implied.values)
    return choice, implied


def _own_address(world: World, master_addr: str) -> str:
    """Return the address from which this node talks to rank 0's.

    Raises:
        ClusterError: MASTER_ADDR does not resolve here, is loopback between nodes, or leads
            nowhere.
    """
    node = socket.gethostname()
    try:
        found = socket.getaddrinfo(master_addr, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ClusterError(
            problem=f"MASTER_ADDR={master_addr} does not resolve on node {node}: {error}.",
            way_out="Give the launcher an IP address of rank 0's node.",
        ) from error
    addresses = [str(entry[4][0]) for entry in found]
    usable = [
        a for a in addresses if world.num_nodes == 1 or not ipaddress.ip_address(a).is_loopback
    ]
    if not usable:
        raise ClusterError(
            problem=f"MASTER_ADDR={master_addr} is {addresses[0]} on node {node}, which other "
            "nodes cannot reach.",
            way_out="Give the launcher an IP address of rank 0's node that all nodes reach.",
        )
    sources = routes(usable)
    if not sources:
        raise ClusterError(
            problem=f"Node {node} has no route to MASTER_ADDR={master_addr} ({usable[0]}).",
            way_out="Give the launcher an address of rank 0's node that all nodes reach.",
        )
    return next(iter(sources.values()))
