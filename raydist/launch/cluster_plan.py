# SPDX-License-Identifier: Apache-2.0
"""What a run would be on the cluster that is there: ranks, nodes and network. Reserves nothing."""

from __future__ import annotations

from collections.abc import Sequence

from raydist.config.cli import Request
from raydist.launch import cluster
from raydist.launch.cluster_view import ClusterView, NodeView
from raydist.launch.node_agents import node_agents
from raydist.launch.placement import Placement, eligible, plan_placement
from raydist.launch.preflight import batch_for
from raydist.launch.ray_network import settle_network
from raydist.table import table

_ASK_TIMEOUT_S = 60.0


def describe_on_cluster(request: Request, address: str) -> str:
    """Return the placement on the cluster at ``address``, and each rank's network as a table.

    Raises:
        ClusterError: The cluster cannot be reached, or no network serves.
        ConfigError: What would also stop the run.
    """
    config = request.config
    with cluster.connected(
        address, start_timeout_s=config.scaling.start_timeout_s, with_output=False
    ):
        view = cluster.view()
        placement = plan_placement(config.scaling, view)
        batch_for(request, config, placement.workers)
        node_of_rank = likely_nodes(placement, eligible(placement, view))
        nodes = list({node.node_id: node for node in node_of_rank}.values())
        lines = [f"on the cluster: {placement.describe()} = {placement.describe_bundles()}"]
        missing = placement.workers - len(node_of_rank)
        if missing:
            lines.append(f"{missing} ranks wait for nodes that the autoscaler has to add")
        if not nodes:
            return "\n".join(lines)
        with node_agents(nodes, timeout_s=_ASK_TIMEOUT_S) as agents:
            settled = settle_network(
                agents,
                {node.node_id: node.address for node in nodes},
                config.network,
                backend="nccl" if placement.uses_gpus else "gloo",
                try_it=config.scaling.preflight,
            )
        lines += settled.describe()
        decision = settled.decision
        rows = [
            (
                str(rank),
                decision.by_node[node.node_id].node,
                "GPU" if placement.uses_gpus else "CPU",
                decision.by_node[node.node_id].interface,
                decision.by_node[node.node_id].address,
                decision.by_node[node.node_id].short_source,
            )
            for rank, node in enumerate(node_of_rank)
        ]
        lines.append(table(("rank", "node", "device", "interface", "address", "from"), rows))
        lines.append("Ray may take other nodes of the same kind.")
        return "\n".join(lines)


def likely_nodes(placement: Placement, view: ClusterView) -> list[NodeView]:
    """Return the node of each rank, as far as living nodes go, filling one after the other."""
    most = placement.workers_per_node or placement.workers
    found: list[NodeView] = []
    for node in _fullest_first(view.nodes, placement):
        room = min(
            int(node.resources.get(name, 0) // amount)
            for name, amount in placement.resources_per_worker.items()
        )
        if placement.workers_per_node and room < most:
            continue
        found += [node] * min(room, most, placement.workers - len(found))
    return found


def _fullest_first(nodes: Sequence[NodeView], placement: Placement) -> list[NodeView]:
    """Order nodes as packing takes them: those that hold most ranks first."""
    resource = "GPU" if placement.uses_gpus else "CPU"
    return sorted(nodes, key=lambda node: -node.resources.get(resource, 0))
