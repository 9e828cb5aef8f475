# SPDX-License-Identifier: Apache-2.0
"""How ranks meet: placed on the settled network, a store bound by rank 0, one process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from raydist.config import NetworkConfig
from raydist.launch import ray_rank
from raydist.launch.ranking import RankedGroup
from raydist.launch.ray_network import SettledNetwork


class OnRanks(Protocol):
    """Calls on the ranks of a group."""

    def on_all(
        self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """Call ``function`` on every rank with its arguments; returns results in rank order."""
        ...

    def on_main(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``function`` on rank 0."""
        ...


def join_ranks(
    ranks: OnRanks,
    group: RankedGroup,
    settled: SettledNetwork,
    network: NetworkConfig,
    *,
    with_deepspeed: bool,
) -> list[dict[str, Any]]:
    """Place every rank, let rank 0 bind the store, and join all.

    Args:
        ranks: Reaches them.
        group: Who is which.
        settled: The network of their nodes.
        network: What the configuration says of it.
        with_deepspeed: Whether DeepSpeed's communication is built on top.

    Returns:
        What each rank is to say of itself.
    """
    places = [
        (
            world,
            settled.decision.by_node[node],
            settled.nodes[node],
            network,
            group.gpus[node],
            settled.shared_rdma,
        )
        for world, node in zip(group.worlds, group.node_of_rank, strict=True)
    ]
    facts = ranks.on_all(ray_rank.place_rank, places)
    address, port = ranks.on_main(ray_rank.bind_store, facts[0]["address"], network)
    meeting = (address, port, network, with_deepspeed)
    ranks.on_all(ray_rank.join_group, [(world, *meeting) for world in group.worlds])
    return facts
