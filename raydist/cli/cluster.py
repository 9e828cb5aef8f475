# SPDX-License-Identifier: Apache-2.0
"""`raydist cluster local [-- COMMAND]`: several nodes on this machine, to rehearse a run on."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from raydist.errors import ConfigError
from raydist.testing.local_cluster import LocalCluster

_ENDING_TIMEOUT_S = 30.0
_FOR_TERMINALS = ("PATH", "TMPDIR")


@dataclass(frozen=True, kw_only=True, slots=True)
class Local:
    """Start a Ray cluster of several nodes on this machine and run a command on its first node.

    The command follows `--` and is given RAY_ADDRESS; its exit status is the result. Without a
    command the cluster stays until Ctrl-C. Each node has a management and a faster data network,
    by interface names that differ. Needs root on Linux.
    """

    nodes: int = 3
    """How many nodes; each takes about 250 MB of memory."""
    cpus: int = 2
    """Logical CPUs of each."""
    gpus: int = 0
    """Logical GPUs of each; they need not exist."""
    data_network: bool = True
    """Have a second, unlimited network."""
    management_rate_mbps: float = 100.0
    """Rate of the network by whose addresses Ray knows the nodes, in Mbit/s."""
    ipv6: bool = False
    """Have IPv6 addresses only."""
    logs: Path | None = None
    """Folder to copy the logs to at the end."""


def run(arguments: Sequence[str]) -> int:
    """Run one `raydist cluster` command; the status of the command given, if one is.

    Raises:
        ConfigError: There is no such command.
    """
    own, command = _split(arguments)
    if own and own[0] not in ("local", "-h", "--help"):
        raise ConfigError(
            problem=f"There is no command `raydist cluster {own[0]}`.",
            way_out="Use `raydist cluster local`; real clusters are started with `ray up` or "
            "`ray start`.",
        )
    options = tyro.cli(
        Local, args=own[1:] if own[:1] == ["local"] else ["--help"], prog="raydist cluster local"
    )
    with LocalCluster(
        options.nodes,
        cpus_per_node=options.cpus,
        gpus_per_node=options.gpus,
        data_network=options.data_network,
        management_rate_mbps=options.management_rate_mbps,
        ip_version=6 if options.ipv6 else 4,
        dashboard=True,
        folder=options.logs,
    ) as cluster:
        print(_describe(cluster), flush=True)
        if command:
            return _run_inside(cluster, command)
        print(_explain(cluster), flush=True)
        threading.Event().wait()
    return 0


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what comes before `--`, and what after."""
    if "--" not in arguments:
        return list(arguments), []
    at = list(arguments).index("--")
    return list(arguments[:at]), list(arguments[at + 1 :])


def _run_inside(cluster: LocalCluster, command: list[str]) -> int:
    process = cluster.node(1).popen(command)
    try:
        status = process.wait()
    except KeyboardInterrupt:
        # The command has heard the terminal's Ctrl-C too.
        try:
            status = process.wait(_ENDING_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise KeyboardInterrupt from None
    return status if status >= 0 else 128 - status


def _describe(cluster: LocalCluster) -> str:
    rows = [("node", "host", "interfaces")]
    for node in cluster.nodes:
        links = (f"{x.network}: {x.interface} {x.address}/{x.prefix}" for x in node.plan.links)
        rows.append((str(node.plan.number), node.plan.host, ", ".join(links)))
    width = max(len(host) for _, host, _ in rows)
    table = "\n".join(f"  {n:<4}  {host:<{width}}  {links}" for n, host, links in rows)
    return f"{len(cluster.nodes)} nodes, Ray's head is node 1 at {cluster.address}\n{table}"


def _explain(cluster: LocalCluster) -> str:
    entries = []
    for node in cluster.nodes:
        variables = {
            name: value
            for name, value in node.environment.items()
            if name.startswith("RAY_") or name in _FOR_TERMINALS
        }
        entries.append(node.write_entry(variables))
    head, last = entries[0], cluster.nodes[-1].plan
    port = last.links[-1].port
    switch = f"ip -n {cluster.switch_namespace} link set {port}"
    return (
        "From another terminal, as root:\n"
        f"  {head} python jobs/llama_zero3.py\n"
        f"  {head} ray job submit -- python jobs/llama_zero3.py\n"
        f"  {switch} down   # cuts this link of node {last.number}; `up` brings it back\n"
        f"  kill -9 $(ip netns pids {last.host})   # kills node {last.number}\n"
        f"{head} alone is a shell on node 1. Ctrl-C here ends the cluster."
    )
