# SPDX-License-Identifier: Apache-2.0
"""Which worker becomes which rank. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raydist.errors import ConfigError
from raydist.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlace:
    """Where a worker came up: its node, its bundle, and the GPUs that Ray gave it."""

    node_id: str
    bundle: int
    gpu_ids: tuple[str, ...] = ()


def order_workers(places: Sequence[WorkerPlace]) -> list[int]:
    """Return the workers in rank order: contiguous by node, by GPU number on each.

    Nodes come in the order of their first bundle, and are told apart by id: two Ray nodes on one
    host stay two.

    Raises:
        ConfigError: Two workers were given one GPU.
    """
    first: dict[str, int] = {}
    for place in places:
        first[place.node_id] = min(place.bundle, first.get(place.node_id, place.bundle))
    taken = Counter((p.node_id, gpu) for p in places for gpu in p.gpu_ids)
    shared = [f"GPU {gpu} of node {node}" for (node, gpu), n in taken.items() if n > 1]
    if shared:
        raise ConfigError(
            problem=f"Several ranks were given {', '.join(shared)}.",
            way_out="Start Ray there without fractional GPUs; one rank drives one GPU.",
        )

    def key(index: int) -> tuple[int, str, tuple[tuple[int, str], ...], int, int]:
        place = places[index]
        gpus = tuple((int(g) if g.isdigit() else -1, g) for g in place.gpu_ids)
        return first[place.node_id], place.node_id, gpus, place.bundle, index

    return sorted(range(len(places)), key=key)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedGroup:
    """Workers as ranks: their order, each rank's node and world, each node's GPUs in rank order."""

    order: tuple[int, ...]
    node_of_rank: tuple[str, ...]
    worlds: tuple[World, ...]
    gpus: Mapping[str, tuple[str, ...]]


def rank_group(places: Sequence[WorkerPlace]) -> RankedGroup:
    """Return which worker becomes which rank.

    Raises:
        ConfigError: Two workers were given one GPU.
    """
    order = order_workers(places)
    gpus: dict[str, tuple[str, ...]] = {}
    for index in order:
        place = places[index]
        gpus[place.node_id] = (*gpus.get(place.node_id, ()), *place.gpu_ids)
    node_of_rank = tuple(places[index].node_id for index in order)
    return RankedGroup(
        order=tuple(order),
        node_of_rank=node_of_rank,
        worlds=tuple(rank_worlds(node_of_rank)),
        gpus=gpus,
    )


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
