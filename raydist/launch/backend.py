# SPDX-License-Identifier: Apache-2.0
"""Ray Train's backend hook: interfaces, rendezvous and DeepSpeed's communication per group.

Runs in the Train controller, which imports no torch; what it sends to the workers does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.train.backend import Backend, BackendConfig

from raydist.config import NetworkConfig
from raydist.errors import ClusterError, RaydistError
from raydist.launch import ray_rank
from raydist.launch.comparison import compare_nodes
from raydist.launch.early_group import EarlyGroup
from raydist.launch.placement import Placement
from raydist.launch.ranking import rank_worlds
from raydist.launch.ray_network import settle_network

_LEAVE_TIMEOUT_S = 5.0


@dataclass
class RaydistConfig(BackendConfig):
    """What the backend needs of the run.

    Fields:
        early_group: Workers that the driver has started already, for the first group.
        placement: What each group reserves.
        preflight: Whether nodes are compared and the network is tried before each group trains.
    """

    network: NetworkConfig
    with_deepspeed: bool
    early_group: EarlyGroup
    placement: Placement
    preflight: bool = True

    @property
    def backend_cls(self) -> type[Backend]:
        """The hook's implementation."""
        return RaydistBackend


class RaydistBackend(Backend):
    """Joins the workers of each group before any user code runs."""

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Compare the nodes, choose the network, bind the rendezvous store, join all ranks.

        Raises:
            ClusterError: A node is unfit, an interface is not usable.
            RankUnreachableError: Nodes do not answer each other.
            RayTaskError: Anything else that a worker raised.
        """
        if not isinstance(backend_config, RaydistConfig):
            raise ClusterError(problem=f"unexpected backend {type(backend_config).__name__}")
        config = backend_config
        workers = worker_group.get_workers()
        node_of_rank = [worker.metadata.node_id for worker in workers]
        worlds = rank_worlds(node_of_rank)
        leaders = {node: node_of_rank.index(node) for node in node_of_rank}

        def on_nodes(
            function: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]]
        ) -> dict[str, Any]:
            calls = {
                node: worker_group.execute_single_async(leaders[node], function, *each)
                for node, each in arguments.items()
            }
            return dict(zip(calls, ray.get(list(calls.values())), strict=True))

        def on_all(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
            return ray.get(
                [
                    worker_group.execute_single_async(world.rank, function, world, *each)
                    for world, each in zip(worlds, arguments, strict=True)
                ]
            )

        def say(text: str) -> None:
            worker_group.execute_single(0, ray_rank.say, text)

        addresses = {node: workers[rank].metadata.node_ip for node, rank in leaders.items()}
        try:
            if config.preflight:
                for line in compare_nodes(on_nodes, addresses):
                    say(line)
            settled = settle_network(
                on_nodes,
                addresses,
                config.network,
                backend="nccl" if config.placement.uses_gpus else "gloo",
                try_it=config.preflight,
            )
            for line in settled.describe() if len(settled.nodes) > 1 else ():
                say(line)
            gpus = _gpus_by_node(workers)
            facts = on_all(
                ray_rank.place_rank,
                [
                    (
                        settled.decision.by_node[node],
                        settled.nodes[node],
                        config.network,
                        gpus[node],
                    )
                    for node in node_of_rank
                ],
            )
            address, port = worker_group.execute_single(
                0, ray_rank.bind_store, facts[0]["address"], config.network
            )
            meeting = (address, port, config.network, config.with_deepspeed)
            on_all(ray_rank.join_group, [meeting] * len(worlds))
            worker_group.execute_single(0, ray_rank.say_ranks, facts)
        except RayTaskError as error:
            if isinstance(error.cause, RaydistError):
                raise error.cause from None
            raise

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Take the process groups down, so that no rank warns about a peer that left."""
        calls = worker_group.execute_async(ray_rank.leave_group)
        ray.wait(calls, num_returns=len(calls), timeout=_LEAVE_TIMEOUT_S)


def _gpus_by_node(workers: Sequence[Any]) -> dict[str, tuple[str, ...]]:
    """Return each node's GPUs in the order of its ranks."""
    gpus: dict[str, tuple[str, ...]] = {}
    for worker in workers:
        mine = worker.metadata.accelerator_ids.get("GPU", ())
        node = worker.metadata.node_id
        gpus[node] = (*gpus.get(node, ()), *(str(gpu) for gpu in mine))
    return gpus
