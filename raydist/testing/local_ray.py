# SPDX-License-Identifier: Apache-2.0
"""What Ray is started with on a node of a local cluster, and what is waited for. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

GCS_PORT, DASHBOARD_PORT = 6379, 8265
_AGENT_PORT = 52365
_WORKER_PORTS, _NUM_WORKER_PORTS = 10002, 2000

RAYLET_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Workers are started when asked for: idle ones would cost each node 100 MB a CPU.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
}

# Program: until something listens at HOST PORT.
WAIT_FOR_LISTENER = """
import socket, sys, time
while True:
    try:
        socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()
        break
    except OSError:
        time.sleep(0.05)
"""

# Program: until the head at HOST:PORT knows a living Ray node for each of the ADDRESSES.
WAIT_FOR_NODES = """
import sys, time
from ray._raylet import GcsClient
from ray.core.generated.gcs_pb2 import GcsNodeInfo
client, wanted = GcsClient(address=sys.argv[1]), sys.argv[2:]
while True:
    infos = client.get_all_node_info(timeout=30).values()
    alive = [i.node_manager_address for i in infos if i.state == GcsNodeInfo.ALIVE]
    if all(alive.count(address) >= wanted.count(address) for address in wanted):
        break
    time.sleep(0.1)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayOffer:
    """What a node offers to Ray: logical resources, and the size of its object store."""

    cpus: int
    gpus: int
    object_store_bytes: int
    resources: Mapping[str, float] = field(default_factory=dict)


def start_arguments(offer: RayOffer, *, address: str, index: int) -> list[str]:
    """Return the arguments of `ray start` that heads and others share.

    Args:
        offer: What the node has.
        address: Its own.
        index: Ray nodes that its host has already; the next must not want the ports of the first.
    """
    first_port = _WORKER_PORTS + index * _NUM_WORKER_PORTS
    return [
        f"--node-ip-address={address}",
        f"--num-cpus={offer.cpus}",
        f"--num-gpus={offer.gpus}",
        f"--resources={json.dumps(dict(offer.resources))}",
        f"--object-store-memory={offer.object_store_bytes}",
        f"--dashboard-agent-listen-port={_AGENT_PORT + index}",
        f"--min-worker-port={first_port}",
        f"--max-worker-port={first_port + _NUM_WORKER_PORTS - 1}",
        "--disable-usage-stats",
    ]


def head_arguments(*, folder: Path, loopback: str | None) -> list[str]:
    """Return the arguments of `ray start` that only a head has.

    Args:
        folder: Ray's, by the same name on all nodes.
        loopback: Address of the job server, None for no job server.
    """
    return [
        "--head",
        f"--port={GCS_PORT}",
        f"--temp-dir={folder}",
        f"--include-dashboard={'false' if loopback is None else 'true'}",
        *([] if loopback is None else [f"--dashboard-host={loopback}"]),
        f"--dashboard-port={DASHBOARD_PORT}",
    ]


def host_port(address: str, port: int) -> str:
    """Join an address and a port; an IPv6 address goes into brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
