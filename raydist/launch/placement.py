# SPDX-License-Identifier: Apache-2.0
"""How many ranks, with what, on which nodes, and whether the cluster can ever hold them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raydist.config import ScalingConfig
from raydist.errors import CapacityError, ConfigError
from raydist.launch.cluster_view import ClusterView, restricted, without_excluded
from raydist.launch.labels import matches

_NODE_ID_LABEL = "ray.io/node-id"
_ACCELERATOR_LABEL = "ray.io/accelerator-type"
_ACCELERATOR_RESOURCE = "accelerator_type:"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Ranks, the resources that each reserves, and where.

    Fields:
        workers_per_node: So many on each of `workers / workers_per_node` nodes, exactly; None
            packs them as tightly as fits.
        labels: Ray label selector that every node of the run matches.
    """

    workers: int
    resources_per_worker: dict[str, float]
    workers_per_node: int | None = None
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def uses_gpus(self) -> bool:
        """Whether each rank drives a GPU."""
        return "GPU" in self.resources_per_worker

    @property
    def strategy(self) -> str:
        """Ray's placement strategy for the bundles."""
        return "STRICT_SPREAD" if self.workers_per_node else "PACK"

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What Ray is asked to reserve: a bundle a rank, or a bundle a node."""
        if not self.workers_per_node:
            return [dict(self.resources_per_worker)] * self.workers
        each = {k: v * self.workers_per_node for k, v in self.resources_per_worker.items()}
        return [each] * (self.workers // self.workers_per_node)

    def bundle_of(self, worker: int) -> int:
        """Return the bundle that a worker, counted from 0, lives in."""
        return worker // (self.workers_per_node or 1)

    def describe_bundles(self) -> str:
        """Return what Ray is asked to reserve, in words."""
        bundles = self.bundles
        return f"{len(bundles)} bundles of {_amounts(bundles[0])}, {self.strategy}"

    def describe(self) -> str:
        """Return ranks and bundles in words."""
        text = f"{self.workers} x {_amounts(self.resources_per_worker)}"
        if self.workers_per_node:
            num_nodes = self.workers // self.workers_per_node
            text += f", {self.workers_per_node} on each of {num_nodes} nodes"
        return text


def plan_placement(scaling: ScalingConfig, view: ClusterView) -> Placement:
    """Decide ranks and reserve exactly what they need.

    Raises:
        CapacityError: More than the cluster can ever have; says asked, free, could-scale-to.
        ConfigError: GPUs per node asked of a cluster without a GPU; an excluded node that is none.
    """
    labels = dict(scaling.labels)
    view, excluded = without_excluded(scaling.exclude_nodes, view)
    if excluded:
        labels[_NODE_ID_LABEL] = f"!in({','.join(excluded)})"
    view = restricted(view, lambda node: matches(scaling.labels, node.labels))
    if not view.nodes and not _can_grow(view):
        raise ConfigError(
            problem=f"No node matches scaling.labels={scaling.labels}, and the cluster cannot "
            "grow.",
            way_out="Start Ray on nodes with --labels, or leave scaling.labels out.",
        )
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
    if scaling.accelerator_type:
        labels[_ACCELERATOR_LABEL] = scaling.accelerator_type
        wanted = f"{_ACCELERATOR_RESOURCE}{scaling.accelerator_type}"
        view = restricted(view, lambda node: wanted in node.resources)
    per_node = workers // scaling.nodes if scaling.nodes else None
    each = scaling.cpus_per_worker or _cpu_share(view, workers, per_node, has_gpus)
    placement = Placement(
        workers=workers,
        resources_per_worker={"CPU": each} | ({"GPU": 1.0} if has_gpus else {}),
        workers_per_node=per_node,
        labels=labels,
    )
    _check_capacity(placement, view)
    return placement


def eligible(placement: Placement, view: ClusterView) -> ClusterView:
    """Return the view of the nodes that match the placement's labels."""
    return restricted(view, lambda node: matches(placement.labels, node.labels))


def _can_grow(view: ClusterView) -> bool:
    return any(view.could_scale_to.get(n, 0) > view.total.get(n, 0) for n in ("GPU", "CPU"))


def _check_capacity(placement: Placement, view: ClusterView) -> None:
    """Stop when the bundles can never all be placed, by sums or node by node.

    Raises:
        CapacityError: They cannot.
    """
    workers, resources = placement.workers, placement.resources_per_worker
    bundle, wanted = placement.bundles[0], len(placement.bundles)
    most_on_one = 1 if placement.workers_per_node else wanted
    fitting = sum(_fitting(bundle, node.resources, most_on_one) for node in view.nodes)
    could_fit = sum(
        _fitting(bundle, kind.resources, most_on_one) * kind.max_count for kind in view.node_types
    )
    could_fit = max(fitting, could_fit)
    can_grow = any(view.could_scale_to.get(n, 0) > view.total.get(n, 0) for n in resources)
    fits = could_fit >= wanted or (can_grow and not view.node_types)
    if placement.workers_per_node and not fits:
        raise CapacityError(
            resource=f"nodes with {_amounts(bundle)} each",
            asked=wanted,
            free=fitting,
            could_scale_to=could_fit,
            way_out=f"Lower {_to_lower(placement, 'CPU')}, or add nodes.",
        )
    for name in sorted(resources, reverse=True):
        asked, limit = resources[name] * workers, view.could_scale_to.get(name, 0)
        is_short = asked > limit
        if is_short or (name == "CPU" and not fits):
            what = f"Only {could_fit:g} of {placement.describe()} fit the nodes: "
            raise CapacityError(
                resource=name,
                asked=asked,
                free=view.free.get(name, 0),
                could_scale_to=limit,
                way_out=f"{'L' if is_short else f'{what}l'}ower {_to_lower(placement, name)}, or "
                "add nodes.",
            )


def _fitting(bundle: Mapping[str, float], resources: Mapping[str, float], most: int) -> int:
    return min(most, *(int(resources.get(k, 0) // v) for k, v in bundle.items() if v))


def _to_lower(placement: Placement, resource: str) -> str:
    """Return the configuration keys that decide how much is asked."""
    keys = f"scaling.workers={placement.workers}"
    if placement.workers_per_node:
        keys = (
            f"scaling.nodes={placement.workers // placement.workers_per_node} or the "
            f"{placement.workers_per_node} ranks on each"
        )
    if resource == "CPU":
        keys += f" or scaling.cpus_per_worker={placement.resources_per_worker['CPU']:g}"
    return keys


def _amounts(resources: Mapping[str, float]) -> str:
    return f"[{', '.join(f'{v:g} {k}' for k, v in resources.items())}]"


def _gpus_now(scaling: ScalingConfig, view: ClusterView) -> float:
    """Count the GPUs that are there, of the asked type where one is asked for.

    Raises:
        ConfigError: None is of that type, and the cluster cannot grow.
    """
    prefix = _ACCELERATOR_RESOURCE
    wanted = f"{prefix}{scaling.accelerator_type}" if scaling.accelerator_type else None
    nodes = [n.resources for n in view.nodes]
    count = sum(n.get("GPU", 0) for n in nodes if wanted is None or wanted in n)
    if not count and wanted and view.could_scale_to["GPU"] <= view.total.get("GPU", 0):
        types = sorted({k.removeprefix(prefix) for n in nodes for k in n if prefix in k})
        raise ConfigError(
            problem=f"scaling.accelerator_type={scaling.accelerator_type}, and no node has one; "
            f"there are {', '.join(types) or 'none with a type'}.",
            way_out="Set scaling.accelerator_type to one of these, or leave it out.",
        )
    return count


def _cpu_share(view: ClusterView, workers: int, per_node: int | None, has_gpus: bool) -> float:
    """Return the whole CPUs a rank may have, so that all ranks fit node by node.

    With GPUs it is a GPU's share on the node that has fewest for each, one CPU of the node left
    for others; without, the most that places all ranks on the nodes that are there.
    """
    nodes = [n.resources for n in view.nodes]
    if has_gpus:
        shares = [int((n.get("CPU", 0) - 1) // n["GPU"]) for n in nodes if n.get("GPU")]
        return float(max(1, min(shares, default=1)))
    cpus = [int(node.get("CPU", 0)) for node in nodes]
    if per_node:
        enough = sorted(cpus, reverse=True)[: workers // per_node]
        return float(max(1, min(enough, default=1) // per_node))
    share = max(cpus, default=1)
    while share > 1 and sum(have // share for have in cpus) < workers:
        share -= 1
    return float(max(1, share))
