# SPDX-License-Identifier: Apache-2.0
"""How many ranks, with what, and whether the cluster can ever hold them. Pure but for the view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raydist.config import ScalingConfig
from raydist.errors import CapacityError, ConfigError
from raydist.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterView:
    """What a cluster has: resources in all, free now, at most with its autoscaler, and by node."""

    total: Mapping[str, float]
    free: Mapping[str, float]
    could_scale_to: Mapping[str, float]
    nodes: Sequence[Mapping[str, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Ranks and the resources that each reserves."""

    workers: int
    resources_per_worker: dict[str, float]

    @property
    def uses_gpus(self) -> bool:
        """Whether each rank drives a GPU."""
        return "GPU" in self.resources_per_worker

    def describe(self) -> str:
        """Return the bundles in words."""
        each = ", ".join(f"{v:g} {k}" for k, v in self.resources_per_worker.items())
        return f"{self.workers} x [{each}]"


def plan_placement(scaling: ScalingConfig, view: ClusterView) -> Placement:
    """Decide ranks and reserve exactly what they need.

    Raises:
        CapacityError: More than the cluster can ever have; says asked, free, could-scale-to.
        ConfigError: GPUs per node asked of a cluster without a GPU.
    """
    has_gpus = view.could_scale_to.get("GPU", 0) > 0
    if has_gpus:
        # Those that are there now; more only when the configuration asks for them.
        there = _gpus_now(scaling, view) or view.could_scale_to["GPU"]
        workers = scaling.planned_workers or int(there)
    elif scaling.gpus_per_node or scaling.accelerator_type:
        what = f"scaling.gpus_per_node={scaling.gpus_per_node}"
        if scaling.accelerator_type:
            what = f"scaling.accelerator_type={scaling.accelerator_type}"
        raise ConfigError(
            problem=f"{what}, and the cluster has no GPU and can get none.",
            way_out="Add GPU nodes, or set scaling.workers for ranks on CPUs.",
        )
    else:
        workers = scaling.planned_workers or scaling.cpu_workers
    each = scaling.cpus_per_worker or _cpu_share(view, workers, has_gpus)
    resources = {"CPU": each} | ({"GPU": 1.0} if has_gpus else {})
    placement = Placement(workers=workers, resources_per_worker=resources)
    _check_capacity(placement, view)
    return placement


def _check_capacity(placement: Placement, view: ClusterView) -> None:
    """Stop when the bundles can never all be placed, by sums or node by node.

    Raises:
        CapacityError: They cannot.
    """
    workers, resources = placement.workers, placement.resources_per_worker
    fitting = sum(
        min(int(node.get(name, 0) // amount) for name, amount in resources.items())
        for node in view.nodes
    )
    can_grow = any(view.could_scale_to.get(n, 0) > view.total.get(n, 0) for n in resources)
    for name in sorted(resources, reverse=True):
        asked, limit = resources[name] * workers, view.could_scale_to.get(name, 0)
        is_short = asked > limit
        if is_short or (name == "CPU" and fitting < workers and not can_grow):
            what = "" if is_short else f"Only {fitting} of {placement.describe()} fit the nodes: "
            lower = f"ower scaling.workers={workers}"
            if name == "CPU":
                lower += f" or scaling.cpus_per_worker={resources[name]:g}"
            raise CapacityError(
                resource=name,
                asked=asked,
                free=view.free.get(name, 0),
                could_scale_to=limit,
                way_out=f"{what}{'l' if what else 'L'}{lower}, or add nodes.",
            )


def _gpus_now(scaling: ScalingConfig, view: ClusterView) -> float:
    """Count the GPUs that are there, of the asked type where one is asked for.

    Raises:
        ConfigError: None is of that type, and the cluster cannot grow.
    """
    prefix = "accelerator_type:"
    wanted = f"{prefix}{scaling.accelerator_type}" if scaling.accelerator_type else None
    count = sum(n.get("GPU", 0) for n in view.nodes if wanted is None or wanted in n)
    if not count and wanted and view.could_scale_to["GPU"] <= view.total.get("GPU", 0):
        types = sorted({k.removeprefix(prefix) for n in view.nodes for k in n if prefix in k})
        raise ConfigError(
            problem=f"scaling.accelerator_type={scaling.accelerator_type}, and no node has one; "
            f"there are {', '.join(types) or 'none with a type'}.",
            way_out="Set scaling.accelerator_type to one of these, or leave it out.",
        )
    return count


def _cpu_share(view: ClusterView, workers: int, has_gpus: bool) -> float:
    """Return the whole CPUs a rank may have, so that all ranks fit node by node.

    With GPUs it is a GPU's share on the node that has fewest for each, one CPU of the node left
    for others; without, the most that places all ranks on the nodes that are there.
    """
    if has_gpus:
        shares = [int((n.get("CPU", 0) - 1) // n["GPU"]) for n in view.nodes if n.get("GPU")]
        return float(max(1, min(shares, default=1)))
    cpus = [int(node.get("CPU", 0)) for node in view.nodes]
    share = max(cpus, default=1)
    while share > 1 and sum(have // share for have in cpus) < workers:
        share -= 1
    return float(max(1, share))


def rank_worlds(node_of_rank: Sequence[str]) -> list[World]:
    """Return each rank's World from the Ray node id of each rank, in rank order.

    Local ranks count the ranks of one Ray node, whatever host or address it has.
    """
    nodes = list(dict.fromkeys(node_of_rank))
    sizes = Counter(node_of_rank)
    seen: Counter[str] = Counter()
    worlds = []
    for rank, node in enumerate(node_of_rank):
        worlds.append(
            World(
                world_size=len(node_of_rank),
                rank=rank,
                local_world_size=sizes[node],
                local_rank=seen[node],
                num_nodes=len(nodes),
                node_rank=nodes.index(node),
            )
        )
        seen[node] += 1
    return worlds
