# SPDX-License-Identifier: Apache-2.0
"""Ray Train's backend hook: interfaces, rendezvous and DeepSpeed's communication per group.

Runs in the Train controller, which imports no torch; what it sends to the workers does.
"""

from __future__ import annotations

import time
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
from raydist.launch.ray_network import SettledNetwork, settle_network

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
        group = _Group(worker_group)
        try:
            settled = _settle(group, backend_config)
            _join(group, backend_config, settled)
        except RayTaskError as error:
            if isinstance(error.cause, RaydistError):
                raise error.cause from None
            raise

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Take the process groups down, so that no rank warns about a peer that left."""
        calls = worker_group.execute_async(ray_rank.leave_group)
        ray.wait(calls, num_returns=len(calls), timeout=_LEAVE_TIMEOUT_S)


class _Group:
    """The workers of a group: calls on every rank, or on the first rank of every node."""

    def __init__(self, worker_group: Any) -> None:
        self._worker_group = worker_group
        self.workers: Sequence[Any] = worker_group.get_workers()
        self.node_of_rank: list[str] = [w.metadata.node_id for w in self.workers]
        self.worlds = rank_worlds(self.node_of_rank)
        self._leaders = {node: self.node_of_rank.index(node) for node in self.node_of_rank}

    @property
    def addresses(self) -> dict[str, str]:
        """The cluster's address of each node, by node id."""
        return {node: self.workers[rank].metadata.node_ip for node, rank in self._leaders.items()}

    def on_nodes(
        self, function: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]]
    ) -> dict[str, Any]:
        """Call ``function`` on the first rank of each node."""
        calls = {
            node: self._worker_group.execute_single_async(self._leaders[node], function, *each)
            for node, each in arguments.items()
        }
        return dict(zip(calls, ray.get(list(calls.values())), strict=True))

    def on_all(
        self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """Call ``function`` on every rank, with its world first."""
        return ray.get(
            [
                self._worker_group.execute_single_async(world.rank, function, world, *each)
                for world, each in zip(self.worlds, arguments, strict=True)
            ]
        )

    def on_main(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``function`` on rank 0."""
        return self._worker_group.execute_single(0, function, *arguments)

    def say(self, lines: Sequence[str]) -> None:
        """Show lines to the user."""
        for line in lines:
            self.on_main(ray_rank.say, line)


def _settle(group: _Group, config: RaydistConfig) -> SettledNetwork:
    """Compare the nodes and choose their network, as far as the preflight is asked for."""
    begun = time.monotonic()
    if config.preflight:
        group.say(compare_nodes(group.on_nodes, group.addresses))
    settled = settle_network(
        group.on_nodes,
        group.addresses,
        config.network,
        backend="nccl" if config.placement.uses_gpus else "gloo",
        try_it=config.preflight,
    )
    if len(settled.nodes) > 1:
        group.say(settled.describe())
        if config.preflight:
            seconds = time.monotonic() - begun
            group.say([f"preflight: {len(settled.nodes)} nodes tried in {seconds:.1f} s"])
    return settled


def _join(group: _Group, config: RaydistConfig, settled: SettledNetwork) -> None:
    """Place every rank, let rank 0 bind the store, join all, and say where each is."""
    gpus = _gpus_by_node(group.workers)
    facts = group.on_all(
        ray_rank.place_rank,
        [
            (settled.decision.by_node[node], settled.nodes[node], config.network, gpus[node])
            for node in group.node_of_rank
        ],
    )
    address, port = group.on_main(ray_rank.bind_store, facts[0]["address"], config.network)
    meeting = (address, port, config.network, config.with_deepspeed)
    group.on_all(ray_rank.join_group, [meeting] * len(group.worlds))
    group.on_main(ray_rank.say_ranks, facts)


def _gpus_by_node(workers: Sequence[Any]) -> dict[str, tuple[str, ...]]:
    """Return each node's GPUs in the order of its ranks."""
    gpus: dict[str, tuple[str, ...]] = {}
    for worker in workers:
        mine = worker.metadata.accelerator_ids.get("GPU", ())
        node = worker.metadata.node_id
        gpus[node] = (*gpus.get(node, ()), *(str(gpu) for gpu in mine))
    return gpus
