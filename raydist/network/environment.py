# SPDX-License-Identifier: Apache-2.0
"""The variables that a choice implies, in each library's own syntax. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from raydist.network.decision import NodeChoice
from raydist.network.facts import NodeNetwork, RdmaDevice, RdmaKind
from raydist.network.presets import GLOO, NCCL, nccl_takes

Backend = Literal["nccl", "gloo"]
Debug = Literal["off", "info", "trace"]

_TRACE_EVENTS = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ImpliedEnvironment:
    """What a rank's environment gets from the choice.

    Fields:
        values: To set, none of which the site has set.
        kept: Of those the choice would set, what the site has set, with the site's value.
        why: Variable to one clause, for both.
        warnings: Kept values that contradict the choice.
    """

    values: Mapping[str, str]
    kept: Mapping[str, str]
    why: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    def explain(self) -> list[str]:
        """Return one line a variable: its value and where it comes from."""
        lines = [f"{key}={value}  {self.why[key]}" for key, value in self.values.items()]
        return lines + [f"{key}={value}  kept from the node" for key, value in self.kept.items()]


def network_environment(
    choice: NodeChoice,
    facts: NodeNetwork,
    *,
    num_nodes: int,
    backend: Backend,
    debug: Debug = "off",
    trace_prefix: str | None = None,
    shared_rdma: Collection[RdmaKind] | None = None,
) -> ImpliedEnvironment:
    """Return the variables that the choice implies; what the site has set is kept.

    gloo takes one concrete name, on a single node too: else it resolves the host name. NCCL takes
    `=name` for an exact match, and on a single node is left to itself. IB_HCA names what NCCL may
    use where one node has several kinds or speeds of RDMA port. With an Elastic Fabric Adapter
    only FI_PROVIDER is named: aws-ofi-nccl sets what else it needs by instance type, and
    FI_EFA_USE_DEVICE_RDMA=1 aborts where the adapter has no RDMA read.

    Args:
        choice: The node's.
        facts: The node's.
        num_nodes: Machines that hold ranks.
        backend: Of the process group.
        debug: `info` makes NCCL say which network it takes; `trace` also records the last
            collectives of each rank and writes them when one times out.
        trace_prefix: Path to which a rank number is added for those records; None leaves torch
            its own, below the cache directory.
        shared_rdma: Kinds that every node has active; None takes the node's own for everyone's.
            A rank that talks over RDMA does not reach one that cannot.

    Source: NCCL user guide, "Environment Variables"; torch 2.13, ProcessGroupNCCL.hpp and
    FlightRecorder.hpp; aws-ofi-nccl, platform-aws; libfabric, fi_efa(7).
    """
    wanted: dict[str, tuple[str, str]] = {GLOO: (choice.interface, choice.source)}
    if backend == "nccl":
        wanted |= _nccl(choice, facts, num_nodes, shared_rdma)
    wanted |= _debug(backend, debug, trace_prefix)
    site = {key: facts.environment[key] for key in wanted if facts.environment.get(key)}
    return ImpliedEnvironment(
        values={key: value for key, (value, _) in wanted.items() if key not in site},
        kept=site,
        why={key: why for key, (_, why) in wanted.items()},
        warnings=_contradictions(choice, facts, num_nodes) if backend == "nccl" else (),
    )


def active_rdma(facts: NodeNetwork) -> set[RdmaKind]:
    """Return the kinds of RDMA that a node can use."""
    return {device.kind for device in facts.rdma if device.is_active}


def _nccl(
    choice: NodeChoice,
    facts: NodeNetwork,
    num_nodes: int,
    shared_rdma: Collection[RdmaKind] | None,
) -> dict[str, tuple[str, str]]:
    # torch's default, 3, ends the process too, but leaves the communicators to the kernel.
    wanted = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": ("1", "a failed collective ends the rank")}
    if num_nodes == 1:
        return wanted
    wanted[NCCL] = (f"={choice.interface}", "the same interface, exactly")
    if ":" in choice.address:
        wanted["NCCL_SOCKET_FAMILY"] = ("AF_INET6", f"{choice.address} is IPv6")
    shared = active_rdma(facts) if shared_rdma is None else shared_rdma
    ports = _rdma_ports([device for device in facts.rdma if device.kind in shared])
    if ports:
        names = ",".join(f"{d.name}:{d.port}" for d in ports)
        kind = "InfiniBand" if ports[0].kind == "infiniband" else "RoCE"
        wanted["NCCL_IB_HCA"] = (f"={names}", f"active {kind} ports")
    elif "efa" in shared:
        wanted["FI_PROVIDER"] = ("efa", "Elastic Fabric Adapter")
    elif not facts.rdma or (shared_rdma is not None and not shared):
        wanted["NCCL_IB_DISABLE"] = ("1", "no RDMA device that every node has")
    return wanted


def _rdma_ports(devices: Sequence[RdmaDevice]) -> list[RdmaDevice]:
    """Return the active ports that carry the collectives: one kind, of about one speed.

    InfiniBand and Ethernet ports cannot reach each other, and a slow port, for storage or
    management, would hold back the ring it is in.
    """
    active = [d for d in devices if d.is_active]
    kind = "infiniband" if any(d.kind == "infiniband" for d in active) else "roce"
    ports = sorted((d for d in active if d.kind == kind), key=lambda d: (d.name, d.port))
    fastest = max((d.speed_mbps or 0 for d in ports), default=0)
    return [d for d in ports if d.speed_mbps is None or 2 * d.speed_mbps >= fastest]


def _debug(backend: Backend, debug: Debug, trace_prefix: str | None) -> dict[str, tuple[str, str]]:
    wanted: dict[str, tuple[str, str]] = {}
    why = f"network.debug is {debug}"
    if debug != "off" and backend == "nccl":
        wanted["NCCL_DEBUG"] = ("INFO", why)
        wanted["NCCL_DEBUG_SUBSYS"] = ("INIT,NET", why)
    if debug == "trace":
        wanted["TORCH_FR_BUFFER_SIZE"] = (str(_TRACE_EVENTS), why)
        if trace_prefix is not None:
            wanted["TORCH_FR_DUMP_TEMP_FILE"] = (trace_prefix, why)
        if backend == "nccl":
            wanted["TORCH_NCCL_DUMP_ON_TIMEOUT"] = ("1", why)
    return wanted


def _contradictions(choice: NodeChoice, facts: NodeNetwork, num_nodes: int) -> tuple[str, ...]:
    site = facts.environment
    said = []
    value = site.get(NCCL)
    if num_nodes > 1 and value and not nccl_takes(value, choice.interface):
        said.append(
            f"{choice.node}: {NCCL}={value} leaves out {choice.interface}, which gloo uses; NCCL "
            f"talks over another network"
        )
    ports = _rdma_ports(facts.rdma)
    if site.get("NCCL_IB_DISABLE") == "1" and ports:
        said.append(
            f"{choice.node}: NCCL_IB_DISABLE=1, and {len(ports)} active RDMA ports "
            f"({ports[0].name}, ...) stay idle"
        )
    family = "AF_INET6" if ":" in choice.address else "AF_INET"
    if num_nodes > 1 and site.get("NCCL_SOCKET_FAMILY", family) != family:
        said.append(
            f"{choice.node}: NCCL_SOCKET_FAMILY={site['NCCL_SOCKET_FAMILY']}, and the chosen "
            f"address is {choice.address}"
        )
    provider = site.get("FI_PROVIDER")
    if provider and "efa" not in provider and any(d.kind == "efa" for d in facts.rdma):
        said.append(f"{choice.node}: FI_PROVIDER={provider}, and its EFA adapters stay idle")
    return tuple(said)
