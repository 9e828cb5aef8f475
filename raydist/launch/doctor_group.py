# SPDX-License-Identifier: Apache-2.0
"""A doctor's ranks: reserved, joined on the real backend, made to talk, and ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.train.v2._internal.util import bundle_to_remote_args
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raydist.clock import SystemClock
from raydist.config import NetworkConfig
from raydist.doctor import RankCollectives
from raydist.doctor.finding import label_names
from raydist.doctor.links import Pair, Wave, first_round, second_round
from raydist.errors import CapacityError, ClusterError, RaydistError
from raydist.launch import ray_rank
from raydist.launch.early_group import reserve
from raydist.launch.placement import Placement
from raydist.launch.ranking import WorkerPlace, order_workers, rank_worlds
from raydist.launch.ray_network import SettledNetwork
from raydist.network import NetworkDecision
from raydist.world import World

_RESERVE_TIMEOUT_S = 20.0
_START_TIMEOUT_S = 120.0
_JOIN_TIMEOUT_S = 40.0
_PAIR_TIMEOUT_S = 45.0
_COLLECTIVES_TIMEOUT_S = 60.0
_GROUP_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupResult:
    """What the ranks saw: rates between nodes in bytes per second, and the collectives."""

    rates: Mapping[Pair, float | None] = field(default_factory=dict)
    ranks: tuple[RankCollectives, ...] = ()


class _Rank:
    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what ``function`` returns here."""
        return function(*arguments)


def check_group(
    placement: Placement, settled: SettledNetwork, *, network: NetworkConfig
) -> GroupResult:
    """Start a rank for each worker of ``placement``, and measure pairs of nodes and collectives.

    Raises:
        ClusterError: The ranks did not come up, or did not find each other; names the node.
    """
    group = reserve(placement)
    actors: list[Any] = []
    try:
        _wait_until_reserved(group, placement)
        actors = _start(placement, group)
        return _check(actors, placement, settled, network)
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def _wait_until_reserved(group: PlacementGroup, placement: Placement) -> None:
    """Wait for the bundles.

    Raises:
        CapacityError: They are busy.
    """
    if group.wait(_RESERVE_TIMEOUT_S):
        return
    name = "GPU" if placement.uses_gpus else "CPU"
    raise CapacityError(
        problem=f"{placement.describe()} could not be had within {_RESERVE_TIMEOUT_S:g} s: the "
        "cluster is busy.",
        resource=name,
        asked=placement.resources_per_worker[name] * placement.workers,
        free=ray.available_resources().get(name, 0),
        could_scale_to=ray.cluster_resources().get(name, 0),
        way_out="Run the doctor when nothing else runs, or with --no-collectives.",
    )


def _start(placement: Placement, group: PlacementGroup) -> list[Any]:
    options: dict[str, Any] = bundle_to_remote_args(placement.resources_per_worker)
    rank: Any = ray.remote(**options)(_Rank)
    return [
        rank.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=placement.bundle_of(index)
            )
        ).remote()
        for index in range(placement.workers)
    ]


def _check(
    actors: Sequence[Any],
    placement: Placement,
    settled: SettledNetwork,
    network: NetworkConfig,
) -> GroupResult:
    decision = settled.decision
    where = _all(
        actors, [(ray_rank.where_am_i,)] * len(actors), _START_TIMEOUT_S, "start", decision, ()
    )
    places = [
        WorkerPlace(node_id=node, bundle=placement.bundle_of(index), gpu_ids=gpus)
        for index, (node, gpus) in enumerate(where)
    ]
    order = order_workers(places)
    ranks = [actors[index] for index in order]
    node_of_rank = [places[index].node_id for index in order]
    gpus: dict[str, tuple[str, ...]] = {}
    for index in order:
        gpus[places[index].node_id] = (
            *gpus.get(places[index].node_id, ()),
            *places[index].gpu_ids,
        )
    worlds = rank_worlds(node_of_rank)

    def on_all(timeout_s: float, what: str, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        return _all(ranks, calls, timeout_s, what, decision, node_of_rank)

    limits = replace(network, timeout_s=min(network.timeout_s, _GROUP_TIMEOUT_S))
    facts = on_all(
        _START_TIMEOUT_S,
        "load torch",
        [
            (
                ray_rank.place_rank,
                world,
                decision.by_node[node],
                settled.nodes[node],
                limits,
                gpus[node],
            )
            for world, node in zip(worlds, node_of_rank, strict=True)
        ],
    )
    bound = ranks[0].call.remote(ray_rank.bind_store, facts[0]["address"], limits)
    address, port = _result(bound, _JOIN_TIMEOUT_S, "bind the rendezvous store", decision, "")
    on_all(
        _JOIN_TIMEOUT_S,
        "find each other",
        [(ray_rank.join_group, world, address, port, limits, False) for world in worlds],
    )
    rates = _measure_pairs(ranks, worlds, node_of_rank, _labels(decision), decision)
    if None in rates.values():
        return GroupResult(rates=rates)  # The group is not fit for more.
    checked = on_all(
        _COLLECTIVES_TIMEOUT_S,
        "finish the collectives",
        [(check_rank, world, node) for world, node in zip(worlds, node_of_rank, strict=True)],
    )
    return GroupResult(rates=rates, ranks=tuple(checked))


def _labels(decision: NetworkDecision) -> dict[str, str]:
    return label_names({node: choice.node for node, choice in decision.by_node.items()})


def _measure_pairs(
    ranks: Sequence[Any],
    worlds: Sequence[World],
    node_of_rank: Sequence[str],
    labels: Mapping[str, str],
    decision: NetworkDecision,
) -> dict[Pair, float | None]:
    """Measure nodes against each other in two rounds, by the first rank of each."""
    first = {labels[node]: node_of_rank.index(node) for node in dict.fromkeys(node_of_rank)}
    rates: dict[Pair, float | None] = {}

    def measure(waves: Sequence[Wave]) -> bool:
        for wave in waves:
            calls = {
                (pair, mine): ranks[first[mine]].call.remote(
                    measure_rank_pair, first[pair[1] if mine == pair[0] else pair[0]]
                )
                for pair in wave
                for mine in pair
            }
            found = {
                key: _result(call, _PAIR_TIMEOUT_S, "measure a pair", decision, "")
                for key, call in calls.items()
            }
            for pair in wave:
                both = [found[pair, mine] for mine in pair]
                rates[pair] = None if None in both else min(both)
            if any(rates[pair] is None for pair in wave):
                return False
        return True

    if measure(first_round(list(first))):
        measure(second_round(rates))
    return rates


def _all(
    actors: Sequence[Any],
    calls: Sequence[tuple[Any, ...]],
    timeout_s: float,
    what: str,
    decision: NetworkDecision,
    node_of_rank: Sequence[str],
) -> list[Any]:
    """Call something on every rank and return all results.

    Raises:
        ClusterError: A rank raised, died or took too long; names its node where it is known.
    """
    references = [a.call.remote(*call) for a, call in zip(actors, calls, strict=True)]
    ray.wait(references, num_returns=len(references), timeout=timeout_s)
    nodes = [decision.by_node[node].node for node in node_of_rank] or [""] * len(references)
    deadline = time.monotonic() + 1.0
    return [
        _result(reference, max(0.0, deadline - time.monotonic()), what, decision, node)
        for reference, node in zip(references, nodes, strict=True)
    ]


def _result(
    reference: Any, timeout_s: float, what: str, decision: NetworkDecision, node: str
) -> Any:
    """Return a call's result.

    Raises:
        ClusterError: It raised, its process died, or it took too long.
    """
    who = f"The rank on {node}" if node else "A rank"
    try:
        return ray.get(reference, timeout=timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, RaydistError):
            raise error.cause from None
        raise ClusterError(
            problem=f"{who} did not {what} over {decision.label}: {error.cause!r}",
            way_out="Look at the findings on versions and the network first.",
        ) from error
    except RayError as error:
        raise ClusterError(
            problem=f"{who} did not {what} over {decision.label}: {type(error).__name__}.",
            way_out="Look at the findings on the network first, or leave the node out.",
        ) from error


def measure_rank_pair(peer: int) -> float | None:
    """Measure this rank with another; returns bytes per second. On the rank."""
    from raydist.train.collectives import measure_pair
    from raydist.train.rendezvous import choose_device

    return measure_pair(
        peer,
        device=choose_device(ray_rank.placed_world()),
        clock=SystemClock(),
    )


def check_rank(world: World, node_id: str) -> RankCollectives:
    """Run the collectives with known numbers. On the rank."""
    import torch.distributed as dist

    from raydist.train.collectives import check_collectives, measure_all_reduce
    from raydist.train.rendezvous import choose_device

    device, clock = choose_device(world), SystemClock()
    checks, num_skipped = check_collectives(device=device, clock=clock)
    is_whole = all(check.is_right is not False for check in checks)
    return RankCollectives(
        rank=world.rank,
        node_id=node_id,
        backend=dist.get_backend(),
        checks=checks,
        all_reduce=measure_all_reduce(device=device, clock=clock) if is_whole else None,
        num_skipped=num_skipped,
    )
