# SPDX-License-Identifier: Apache-2.0
"""A doctor's ranks: reserved, joined on the real backend, made to talk, and ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from raydist.clock import SystemClock
from raydist.config import NetworkConfig
from raydist.doctor import RankCollectives
from raydist.doctor.facts import AllReduceRate
from raydist.doctor.finding import label_names
from raydist.doctor.links import Pair, Wave, first_round, second_round
from raydist.errors import CapacityError, ClusterError, RaydistError
from raydist.launch import ray_rank
from raydist.launch.early_group import place_of, release_leftovers, reserve, start_workers
from raydist.launch.meeting import join_ranks
from raydist.launch.placement import Placement
from raydist.launch.ranking import RankedGroup, rank_group
from raydist.launch.ray_network import SettledNetwork
from raydist.network import NetworkDecision
from raydist.network.candidates import hosts_of
from raydist.world import World

_RESERVE_TIMEOUT_S = 20.0
_START_TIMEOUT_S = 60.0
_CALL_TIMEOUT_S = 90.0
_GROUP_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupResult:
    """What the ranks saw: rates between nodes in bytes per second, and the collectives."""

    rates: Mapping[Pair, float | None] = field(default_factory=dict)
    ranks: tuple[RankCollectives, ...] = ()


def check_group(
    placement: Placement, settled: SettledNetwork, *, network: NetworkConfig
) -> GroupResult:
    """Start a rank for each worker of ``placement``, and measure pairs of nodes and collectives.

    Raises:
        ClusterError: The ranks did not come up, or did not find each other; names the node.
    """
    release_leftovers()
    group = reserve(placement)
    actors: list[Any] = []
    try:
        _wait_until_reserved(group, placement)
        actors = start_workers(placement, group, with_deepspeed=None)
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


class _Ranks:
    """Calls on the doctor's ranks; every one ends, and what fails names its node."""

    def __init__(
        self, actors: Sequence[Any], group: RankedGroup, decision: NetworkDecision
    ) -> None:
        self._actors = [actors[index] for index in group.order]
        self._hosts = [decision.by_node[node].node for node in group.node_of_rank]
        self._label = decision.label

    def on_all(
        self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """Call ``function`` on every rank with its arguments."""
        return self.on_some(function, dict(enumerate(arguments)))

    def on_main(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``function`` on rank 0."""
        return self.on_some(function, {0: arguments})[0]

    def on_some(
        self, function: Callable[..., Any], arguments: Mapping[int, tuple[Any, ...]]
    ) -> list[Any]:
        """Call ``function`` on the ranks that have arguments, all at once.

        Raises:
            ClusterError: A rank raised, died or took too long.
        """
        calls = {
            rank: self._actors[rank].execute.remote(function, *each)
            for rank, each in arguments.items()
        }
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=_CALL_TIMEOUT_S)
        what = function.__name__.replace("_", " ")
        results = []
        for rank, call in calls.items():
            try:
                results.append(ray.get(call, timeout=0.1))
            except RayTaskError as error:
                if isinstance(error.cause, RaydistError):
                    raise error.cause from None
                why = str(error).strip().splitlines()[-1]
                raise self._failure(rank, f"{what}: {why}") from error
            except RayError as error:
                raise self._failure(rank, f"{what}: {type(error).__name__}") from error
        return results

    def _failure(self, rank: int, what: str) -> ClusterError:
        return ClusterError(
            problem=f"Rank {rank} on {self._hosts[rank]} failed in `{what}` over {self._label}.",
            way_out="Look at the findings on versions and the network first, or leave the node "
            "out.",
        )


def _check(
    actors: Sequence[Any],
    placement: Placement,
    settled: SettledNetwork,
    network: NetworkConfig,
) -> GroupResult:
    metadata = _metadata(actors)
    group = rank_group(
        [place_of(m, bundle=placement.bundle_of(index)) for index, m in enumerate(metadata)]
    )
    ranks = _Ranks(actors, group, settled.decision)
    limits = replace(network, timeout_s=min(network.timeout_s, _GROUP_TIMEOUT_S))
    join_ranks(ranks, group, settled, limits, with_deepspeed=False)
    rates = _measure_pairs(ranks, group, settled)
    if None in rates.values():
        return GroupResult(rates=rates)  # The group is not fit for more.
    checked: list[RankCollectives] = ranks.on_all(
        check_rank, list(zip(group.worlds, group.node_of_rank, strict=True))
    )
    # All ranks measure, or none: one that saw a wrong number would leave the others waiting.
    if all(check.is_right is not False for rank in checked for check in rank.checks):
        speeds = ranks.on_all(measure_rank, [(world,) for world in group.worlds])
        checked = [
            replace(rank, all_reduce=speed) for rank, speed in zip(checked, speeds, strict=True)
        ]
    return GroupResult(rates=rates, ranks=tuple(checked))


def _metadata(actors: Sequence[Any]) -> list[Any]:
    """Return where the workers came up.

    Raises:
        ClusterError: One did not.
    """
    try:
        return ray.get([a.get_metadata.remote() for a in actors], timeout=_START_TIMEOUT_S)
    except RayError as error:
        raise ClusterError(
            problem=f"A rank did not come up within {_START_TIMEOUT_S:g} s: "
            f"{type(error).__name__}.",
            way_out="Look into Ray's logs on the nodes.",
        ) from error


def _measure_pairs(
    ranks: _Ranks, group: RankedGroup, settled: SettledNetwork
) -> dict[Pair, float | None]:
    """Measure hosts against each other in two rounds, by the first rank of each."""
    names = {node: choice.node for node, choice in settled.decision.by_node.items()}
    labels = label_names(names)
    hosts = hosts_of(list(settled.nodes.values()))
    first: dict[str, int] = {}
    seen: set[int] = set()
    for rank, node in enumerate(group.node_of_rank):
        if hosts[node] not in seen:  # Two Ray nodes of one host reach each other without a wire.
            seen.add(hosts[node])
            first[labels[node]] = rank
    rates: dict[Pair, float | None] = {}

    def measure(waves: Sequence[Wave]) -> bool:
        for wave in waves:
            peers = {first[a]: first[b] for pair in wave for a, b in (pair, pair[::-1])}
            found = ranks.on_some(measure_rank_pair, {r: (peer,) for r, peer in peers.items()})
            by_rank = dict(zip(peers, found, strict=True))
            for pair in wave:
                both = [by_rank[first[name]] for name in pair]
                rates[pair] = None if None in both else min(both)
            if any(rates[pair] is None for pair in wave):
                return False
        return True

    if measure(first_round(list(first))):
        measure(second_round(rates))
    return rates


def measure_rank_pair(peer: int) -> float | None:
    """Measure this rank with another; returns bytes per second. On the rank."""
    from raydist.train.collectives import measure_pair
    from raydist.train.rendezvous import choose_device

    device = choose_device(ray_rank.placed_world())
    return measure_pair(peer, device=device, clock=SystemClock())


def check_rank(world: World, node_id: str) -> RankCollectives:
    """Run the collectives with known numbers. On the rank."""
    import torch.distributed as dist

    from raydist.train.collectives import check_collectives
    from raydist.train.rendezvous import choose_device

    device, clock = choose_device(world), SystemClock()
    checks, num_skipped = check_collectives(device=device, clock=clock)
    return RankCollectives(
        rank=world.rank,
        node_id=node_id,
        backend=dist.get_backend(),
        checks=checks,
        num_skipped=num_skipped,
    )


def measure_rank(world: World) -> AllReduceRate:
    """Measure all-reduce over all ranks. On the rank."""
    from raydist.train.collectives import measure_all_reduce
    from raydist.train.rendezvous import choose_device

    return measure_all_reduce(device=choose_device(world), clock=SystemClock(), num_bytes=4 << 20)
