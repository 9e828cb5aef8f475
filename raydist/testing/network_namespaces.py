# SPDX-License-Identifier: Apache-2.0
"""Network namespaces joined by two bridges: made, cut, slowed and removed with iproute2.

The bridges have a namespace of their own, so that the machine's own namespace, its firewall and
its addresses are neither used nor touched.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from raydist.errors import ClusterError
from raydist.testing.bed_plan import NETWORKS, BedPlan, Link, Network, NodePlan, owner_of

_NAMESPACES = Path("/run/netns")
_END_TIMEOUT_S = 20.0
_POLL_S = 0.02
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}


def requirements_missing() -> str | None:
    """Return in one sentence why this machine cannot hold a local cluster, None when it can."""
    if not sys.platform.startswith("linux"):
        return f"A local cluster is made of Linux namespaces, and this is {sys.platform}."
    if os.geteuid() != 0:
        return "A local cluster needs root for its network namespaces; run it with sudo."
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            return f"A local cluster needs the program {tool} (Debian package {package})."
    return None


class Switch:
    """The bridges of a bed and the namespaces of its nodes. All calls are by one thread."""

    def __init__(self, plan: BedPlan) -> None:
        self.plan = plan

    def open(self) -> None:
        """Make both bridges."""
        _run("ip", "netns", "add", self.plan.switch)
        # Without IPv6 the bridges have no addresses and say nothing themselves.
        commands = []
        for network in NETWORKS:
            commands += [
                f"link add {network} type bridge mcast_snooping 0",
                f"link set {network} addrgenmode none",
                f"link set {network} up",
            ]
        _batch("ip", self.plan.switch, commands)

    def attach(self, node: NodePlan) -> None:
        """Make the namespace of a node and join it to its networks."""
        _run("ip", "netns", "add", node.host)
        inside, outside = ["link set lo up"], []
        for link in node.links:
            outside += [
                f"link add {link.port} type veth peer name {link.interface} netns {node.host}",
                f"link set {link.port} addrgenmode none",
                f"link set {link.port} master {link.network} up",
            ]
            nodad = " nodad" if ":" in link.address else ""
            inside += [
                # Only what a link is given: no link-local address in an IPv4 bed.
                *([] if nodad else [f"link set {link.interface} addrgenmode none"]),
                f"address add {link.address}/{link.prefix} dev {link.interface}{nodad}",
                f"link set {link.interface} up",
            ]
        _batch("ip", self.plan.switch, outside)
        _batch("ip", node.host, inside)
        for link in node.links:
            self.set_rate(node, link, link.rate_mbps)

    def cut(self, link: Link, *, has_carrier: bool) -> None:
        """Let nothing through; with carrier, the node's interface goes on looking healthy."""
        command = "nomaster" if has_carrier else "down"
        _batch("ip", self.plan.switch, [f"link set {link.port} {command}"])

    def restore(self, node: NodePlan, link: Link) -> None:
        """Undo cuts and slowness."""
        _batch("ip", self.plan.switch, [f"link set {link.port} master {link.network} up"])
        self.set_rate(node, link, link.rate_mbps)

    def set_rate(self, node: NodePlan, link: Link, rate_mbps: float | None) -> None:
        """Limit a link in both directions, None for no limit."""
        ends = ((node.host, link.interface), (self.plan.switch, link.port))
        for namespace, device in ends:
            if rate_mbps is None:
                _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "noqueue")
                continue
            # A burst holds one segment of the largest offload, and 10 ms of the rate.
            burst_bytes = max(131072, int(rate_mbps * 1e6 / 8 * 0.01))
            _run(
                "tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf",
                "rate", f"{rate_mbps:g}mbit", "burst", str(burst_bytes), "latency", "100ms",
            )  # fmt: skip

    def count_bytes(self, node: NodePlan, network: Network) -> tuple[int, int]:
        """Return what a node has received and sent over a network, in bytes."""
        link = node.find_link(network)
        if link is None:
            return 0, 0
        shown = _run("ip", "-n", node.host, "-j", "-s", "link", "show", "dev", link.interface)
        counters = json.loads(shown)[0]["stats64"]
        return counters["rx"]["bytes"], counters["tx"]["bytes"]

    def close(self) -> None:
        """Kill what runs in the bed's namespaces and remove them."""
        remove_namespaces(name for name in list_namespaces() if _bed_of(name) == self.plan.name)


def list_namespaces() -> list[str]:
    """Return the names of all beds' namespaces on this machine."""
    if not _NAMESPACES.is_dir():
        return []
    return sorted(n for n in os.listdir(_NAMESPACES) if "-" in n and owner_of(n) is not None)


def remove_namespaces(names: Iterable[str]) -> None:
    """Kill what runs in the namespaces, wait for its end, and remove them; some may be gone."""
    names = list(names)
    end_processes(names)
    for name in names:
        if (_NAMESPACES / name).exists():
            subprocess.run(
                ["ip", "netns", "del", name], capture_output=True, check=False, timeout=30
            )


def list_processes(namespace: str) -> list[int]:
    """Return the ids of the processes in a network namespace; none when it is not there."""
    try:
        inside = os.stat(_NAMESPACES / namespace).st_ino
    except FileNotFoundError:
        return []
    return [pid for pid in psutil.pids() if _network_of(pid) == inside]


def end_processes(namespaces: Iterable[str]) -> None:
    """Kill every process in the namespaces, by id, until there is none.

    Raises:
        ClusterError: Some did not end in time.
    """
    names = list(namespaces)
    deadline = time.monotonic() + _END_TIMEOUT_S
    while left := [pid for name in names for pid in list_processes(name)]:
        if time.monotonic() > deadline:
            raise ClusterError(
                problem=f"Processes {left} of a local cluster did not end within "
                f"{_END_TIMEOUT_S:g} s of SIGKILL.",
                way_out="They wait in the kernel, as for a dead file system; see /proc/PID/stack.",
            )
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_POLL_S)


def _network_of(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None  # It has just ended.


def _bed_of(namespace: str) -> str:
    return namespace.partition("-")[0]


def _batch(tool: str, namespace: str, commands: list[str]) -> None:
    _run(tool, "-n", namespace, "-batch", "-", given="\n".join(commands) + "\n")


def _run(*command: str, given: str = "") -> str:
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, check=False, timeout=30
    )
    if done.returncode != 0:
        raise ClusterError(
            problem=f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}",
            way_out="A local cluster needs a kernel with network namespaces, veth, bridge and "
            "the tbf queue, and a container that runs it must be privileged.",
        )
    return done.stdout
