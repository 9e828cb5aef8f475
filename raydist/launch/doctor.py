# SPDX-License-Identifier: Apache-2.0
"""`raydist doctor` on a cluster: ask every node, try what training relies on, and judge.

The judgement is ``raydist.doctor``'s; here it is carried out with an actor on every node that
could hold ranks, and one rank for each GPU, or for each node where there are none.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from raydist.clock import SystemClock
from raydist.config import NetworkConfig, ScalingConfig
from raydist.doctor import DoctorReport, Finding, NodeFacts, StorageFacts, examine
from raydist.doctor.clocks import measure_offset
from raydist.doctor.finding import in_order, label_names
from raydist.errors import CapacityError, ClusterError, ConfigError, RaydistError
from raydist.launch import cluster
from raydist.launch.cluster_view import ClusterView, NodeView, without_excluded
from raydist.launch.doctor_group import GroupResult, check_group
from raydist.launch.doctor_node import (
    check_node_storage,
    check_readable,
    describe_machine,
    leave_marker,
    look_for_markers,
    take_marker_away,
    tell_time,
)
from raydist.launch.node_agents import NodeAgents, describe_failure, node_agents
from raydist.launch.placement import plan_placement
from raydist.launch.ray_network import SettledNetwork, settle_network
from raydist.table import table

_ASK_TIMEOUT_S = 20.0
_STORAGE_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorRequest:
    """What is to be looked at.

    Fields:
        storage: Location to try from every node, None to leave it.
        readable: Files, folders or s3:// locations that every node must be able to read.
        exclude: Nodes to leave out, by name, address or Ray node id.
        collectives: Whether ranks are started for collectives and bandwidth.
        network: Interfaces and time limits, as a run would have them.
    """

    storage: str | None = None
    readable: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    collectives: bool = True
    network: NetworkConfig = field(default_factory=NetworkConfig)


def examine_cluster(request: DoctorRequest) -> DoctorReport:
    """Look at the cluster that RAY_ADDRESS names, or at this machine.

    Raises:
        ClusterError: The cluster cannot be reached.
        ConfigError: A node to leave out that is none; storage that is no location.
    """
    begun = time.monotonic()
    with cluster.connected(
        cluster.cluster_address(), start_timeout_s=_ASK_TIMEOUT_S, with_output=False
    ):
        # As it is now: a doctor makes no cluster grow.
        view = cluster.view()
        view = replace(view, could_scale_to=view.total, node_types=())
        left, _ = without_excluded(request.exclude, view)
        nodes = _nodes_for_ranks(left)
        with node_agents(nodes, timeout_s=_ASK_TIMEOUT_S) as agents:
            facts, silent = _ask_machines(agents)
            agents.drop(silent)
            findings: list[Finding] = []
            settled = _settle(agents, request.network, _uses_gpus(left), findings)
            facts = _try_storage(agents, facts, request)
            findings += _try_readable(agents, request)
        group = GroupResult()
        if request.collectives and settled is not None and not silent:
            group = _try_group(view, nodes, request, settled, findings, _uses_gpus(left))
        names = {node.node_id: node.name for node in nodes}
        findings += examine(
            list(facts.values()),
            silent={names[node]: why for node, why in silent.items()},
            rates=group.rates,
            ranks=group.ranks,
        )
        return DoctorReport(
            nodes=tuple(facts.values()),
            findings=tuple(in_order(findings)),
            rates=group.rates,
            ranks=group.ranks,
            excluded=request.exclude,
            network=_network_lines(settled),
            seconds=time.monotonic() - begun,
        )


def _network_lines(settled: SettledNetwork | None) -> tuple[str, ...]:
    if settled is None:
        return ()
    rows = [
        (choice.node, choice.interface, choice.address, choice.short_source)
        for choice in settled.decision.by_node.values()
    ]
    shown = table(("node", "interface", "address", "from"), rows)
    return (*settled.describe(), *shown.splitlines())


def _uses_gpus(view: ClusterView) -> bool:
    return any(node.resources.get("GPU") for node in view.nodes)


def _nodes_for_ranks(view: ClusterView) -> list[NodeView]:
    """Return the nodes that could hold ranks: those with GPUs, else those with CPUs.

    Raises:
        ClusterError: There is none.
    """
    resource = "GPU" if _uses_gpus(view) else "CPU"
    nodes = [node for node in view.nodes if node.resources.get(resource, 0) >= 1]
    if not nodes:
        raise ClusterError(
            problem=f"None of the {len(view.nodes)} nodes offers a {resource} to ranks.",
            way_out="Start Ray on a node with --num-cpus or --num-gpus above 0.",
        )
    return nodes


def _ask_machines(agents: NodeAgents) -> tuple[dict[str, NodeFacts], dict[str, str]]:
    """Return the facts of the nodes that answer, clocks included, and why others do not."""
    arguments = {n.node_id: (n.node_id, n.address) for n in agents.nodes.values()}
    facts, failures = agents.gather(describe_machine, arguments)
    silent = {node: describe_failure(error, _ASK_TIMEOUT_S) for node, error in failures.items()}
    clock = SystemClock()
    for node in facts:

        def ask(node: str = node) -> tuple[float, float]:
            return agents(tell_time, {node: ()})[node]

        try:
            facts[node] = replace(facts[node], clock=measure_offset(ask, clock=clock))
        except ClusterError as error:
            silent[node] = error.problem
    return {node: known for node, known in facts.items() if node not in silent}, silent


def _settle(
    agents: NodeAgents, network: NetworkConfig, uses_gpus: bool, findings: list[Finding]
) -> SettledNetwork | None:
    """Choose the network as a run would; what stands in the way becomes a finding."""
    addresses = {node.node_id: node.address for node in agents.nodes.values()}
    if not addresses:
        return None
    try:
        settled = settle_network(
            agents, addresses, network, backend="nccl" if uses_gpus else "gloo", try_it=True
        )
    except ClusterError as error:
        names = _named_in(error.problem, list(agents.nodes.values()))
        findings.append(
            Finding(
                severity="failure",
                check="network",
                where=names,
                what=error.problem,
                why="The ranks could not find each other.",
                what_to_do=error.way_out,
            )
        )
        return None
    findings += [
        Finding(
            severity="warning" if fault.is_slow else "failure",
            check="network",
            where=fault.nodes,
            what=f"{fault.what}; a run would use {settled.decision.label}.",
            why="It is a network of the other nodes too, and may be the fast one.",
            what_to_do=f"Mend the link, or leave {', '.join(fault.nodes)} out with --exclude.",
        )
        for fault in settled.faults
    ]
    findings += [
        Finding(
            severity="warning",
            check="network",
            where=(),
            what=text,
            why="It works, and may be slower or other than meant.",
            what_to_do="See docs/networking.md.",
        )
        for text in settled.decision.warnings
    ]
    return settled


def _try_storage(
    agents: NodeAgents, facts: Mapping[str, NodeFacts], request: DoctorRequest
) -> dict[str, NodeFacts]:
    """Try the storage from every node at once, and whether they see one and the same."""
    facts = dict(facts)
    if request.storage is None or not facts:
        return facts
    session = f"session-{time.time_ns():x}"
    url = cluster_url(request.storage)
    labels = label_names({node: facts[node].node for node in facts})
    # Names in the store differ, even of two machines that are called the same.
    names = {node: f"{facts[node].node}-{node[:8]}" for node in facts}
    found, failures = agents.gather(
        check_node_storage,
        {node: (url, names[node]) for node in facts},
        timeout_s=_STORAGE_TIMEOUT_S,
    )
    for node, error in failures.items():
        why = describe_failure(error, _STORAGE_TIMEOUT_S)
        found[node] = StorageFacts(url=url, failed_step="answer", problem=why)
    for node, storage in found.items():
        facts[node] = replace(facts[node], storage=storage)
    able = [node for node in facts if _has_storage(facts[node])]
    mark = {node: (url, session, names[node]) for node in able}
    agents.gather(leave_marker, mark)
    everyone = tuple(names[node] for node in able)
    unseen, _ = agents.gather(look_for_markers, {n: (url, session, everyone) for n in able})
    agents.gather(take_marker_away, mark)
    label_of = {names[node]: labels[node] for node in able}
    for node, missing in unseen.items():
        storage = facts[node].storage
        if storage is not None:
            there = tuple(label_of[name] for name in missing)
            facts[node] = replace(facts[node], storage=replace(storage, unseen=there))
    return facts


def cluster_url(storage: str) -> str:
    """Return a storage location that means the same on every node.

    Raises:
        ConfigError: A relative path.
    """
    from raydist.launch.preflight import resolve_storage

    return resolve_storage(storage)


def _named_in(text: str, nodes: Sequence[NodeView]) -> tuple[str, ...]:
    """Return the nodes whose whole name is in a text."""
    return tuple(
        n.name for n in nodes if re.search(rf"(?<![\w.-]){re.escape(n.name)}(?![\w-])", text)
    )


def _has_storage(facts: NodeFacts) -> bool:
    return facts.storage is not None and facts.storage.failed_step is None


def _try_readable(agents: NodeAgents, request: DoctorRequest) -> list[Finding]:
    findings = []
    for location in request.readable:
        results, failures = agents.gather(check_readable, {n: (location,) for n in agents.nodes})
        problems = {n: text for n, text in results.items() if text is not None}
        problems |= {n: describe_failure(e, _ASK_TIMEOUT_S) for n, e in failures.items()}
        for node, text in problems.items():
            findings.append(
                Finding(
                    severity="failure",
                    check="readable",
                    where=(agents.nodes[node].name,),
                    what=f"{location} cannot be read: {text}",
                    why="Every rank reads it at its start.",
                    what_to_do="Put it where all nodes reach it, or correct the name.",
                )
            )
    return findings


def _try_group(
    view: ClusterView,
    nodes: Sequence[NodeView],
    request: DoctorRequest,
    settled: SettledNetwork,
    findings: list[Finding],
    uses_gpus: bool,
) -> GroupResult:
    """Start the ranks that training would have and let them talk."""
    scaling = ScalingConfig(exclude_nodes=request.exclude)
    if not uses_gpus:
        scaling = replace(scaling, workers=len(nodes), nodes=len(nodes), cpus_per_worker=1)
    try:
        placement = plan_placement(scaling, view)
        return check_group(placement, settled, network=request.network)
    except (CapacityError, ConfigError, ClusterError, RaydistError) as error:
        is_busy = isinstance(error, CapacityError)
        findings.append(
            Finding(
                severity="warning" if is_busy else "failure",
                check="collectives",
                where=_named_in(str(error), nodes),
                what=error.problem or str(error).splitlines()[0],
                why="Collectives and bandwidth were not tried."
                if is_busy
                else "The ranks did not come to talk to each other.",
                what_to_do=error.way_out,
            )
        )
        return GroupResult()
