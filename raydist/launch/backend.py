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
from raydist.errors import ClusterError, RankUnreachableError, RaydistError
from raydist.launch import ray_rank
from raydist.launch.comparison import compare_nodes
from raydist.launch.early_group import EarlyGroup, place_of
from raydist.launch.meeting import join_ranks
from raydist.launch.placement import Placement
from raydist.launch.rank_lines import describe_ranks
from raydist.launch.ranking import rank_group
from raydist.launch.ray_network import SettledNetwork, settle_network

_LEAVE_TIMEOUT_S = 5.0
_CALL_TIMEOUT_S = 60.0


@dataclass
class RaydistConfig(BackendConfig):
    """What the backend needs of the run.

    Fields:
        early_group: Workers that the driver has started already, for the first group.
        placement: What each group reserves.
        preflight: Whether nodes are compared and the network is tried before each group trains.
        start_timeout_s: How long a worker may take to come up and import.
    """

    network: NetworkConfig
    with_deepspeed: bool
    early_group: EarlyGroup
    placement: Placement
    preflight: bool
    start_timeout_s: float

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
            facts = join_ranks(
                group,
                group.ranked,
                settled,
                backend_config.network,
                with_deepspeed=backend_config.with_deepspeed,
            )
            group.say(describe_ranks(facts))
        except RayTaskError as error:
            if isinstance(error.cause, RaydistError):
                raise error.cause from None
            raise

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Take the process groups down, so that no rank warns about a peer that left."""
        calls = worker_group.execute_async(ray_rank.leave_group)
        ray.wait(calls, num_returns=len(calls), timeout=_LEAVE_TIMEOUT_S)


class _Group:
    """The workers of a group: calls on every rank, or on the first rank of every node.

    Every call has a time limit: a worker that is stopped, or hangs in a file system, would keep
    the others waiting for ever.
    """

    def __init__(self, worker_group: Any) -> None:
        self._worker_group = worker_group
        metadata = [worker.metadata for worker in worker_group.get_workers()]
        self.ranked = rank_group([place_of(m, bundle=rank) for rank, m in enumerate(metadata)])
        self._hosts = {m.node_id: f"{m.hostname} ({m.node_ip})" for m in metadata}
        self.addresses: dict[str, str] = {m.node_id: m.node_ip for m in metadata}
        nodes = self.ranked.node_of_rank
        self._leaders = {node: nodes.index(node) for node in nodes}

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until every worker has imported what it needs.

        Raises:
            RankUnreachableError: One has not; names its node.
        """
        ranks = range(len(self.ranked.node_of_rank))
        calls = [self._worker_group.execute_single_async(r, ray_rank.be_ready) for r in ranks]
        self._results(calls, list(self.ranked.node_of_rank), timeout_s)

    def on_nodes(
        self, function: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]]
    ) -> dict[str, Any]:
        """Call ``function`` on the first rank of each node."""
        calls = {
            node: self._worker_group.execute_single_async(self._leaders[node], function, *each)
            for node, each in arguments.items()
        }
        results = self._results(list(calls.values()), list(calls), _CALL_TIMEOUT_S)
        return dict(zip(calls, results, strict=True))

    def on_all(
        self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """Call ``function`` on every rank."""
        calls = [
            self._worker_group.execute_single_async(rank, function, *each)
            for rank, each in enumerate(arguments)
        ]
        return self._results(calls, list(self.ranked.node_of_rank), _CALL_TIMEOUT_S)

    def on_main(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``function`` on rank 0."""
        call = self._worker_group.execute_single_async(0, function, *arguments)
        return self._results([call], list(self.ranked.node_of_rank[:1]), _CALL_TIMEOUT_S)[0]

    def say(self, lines: Sequence[str]) -> None:
        """Show lines to the user."""
        if lines:
            self.on_main(ray_rank.say, lines)

    def _results(self, calls: list[Any], nodes: list[str], timeout_s: float) -> list[Any]:
        """Return the results of calls that run at the same time.

        Raises:
            RankUnreachableError: A worker did not answer in time; names its node.
        """
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
        for call in done:
            ray.get(call)  # What a worker raised says more than that another waits for it.
        silent = [node for call, node in zip(calls, nodes, strict=True) if call not in done]
        if silent:
            raise RankUnreachableError(
                problem=f"{', '.join(dict.fromkeys(self._hosts[n] for n in silent))}: no answer "
                f"from a rank within {timeout_s:g} s.",
                way_out="Look at that node with `raydist doctor`, or leave it out with "
                "scaling.exclude_nodes.",
            )
        return ray.get(calls)


def _settle(group: _Group, config: RaydistConfig) -> SettledNetwork:
    """Compare the nodes and choose their network, as far as the preflight is asked for."""
    group.wait_until_ready(config.start_timeout_s)
    begun = time.monotonic()
    if config.preflight:
        group.say(compare_nodes(group.on_nodes, group.addresses, group.ranked.gpus))
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
