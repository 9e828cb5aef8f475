# SPDX-License-Identifier: Apache-2.0
"""Ray Train's backend hook: interfaces, rendezvous and DeepSpeed's communication per group.

Runs in the Train controller, which imports no torch; what it sends to the workers does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.train.backend import Backend, BackendConfig

from raydist.config import NetworkConfig
from raydist.errors import ClusterError, RaydistError
from raydist.launch import ray_rank
from raydist.launch.early_group import EarlyGroup
from raydist.launch.placement import rank_worlds

_LEAVE_TIMEOUT_S = 5.0


@dataclass
class RaydistConfig(BackendConfig):
    """What the backend needs of the run.

    Fields:
        early_group: Workers that the driver has started already, for the first group.
    """

    network: NetworkConfig
    with_deepspeed: bool
    early_group: EarlyGroup

    @property
    def backend_cls(self) -> type[Backend]:
        """The hook's implementation."""
        return RaydistBackend


class RaydistBackend(Backend):
    """Joins the workers of each group before any user code runs."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Choose interfaces, let rank 0 bind the rendezvous store, join all ranks.

        Raises:
            ClusterError: A rank cannot be reached or an interface is not usable.
            RayTaskError: Anything else that a worker raised.
        """
        if not isinstance(backend_config, RaydistConfig):
            raise ClusterError(problem=f"unexpected backend {type(backend_config).__name__}")
        config = backend_config
        workers = worker_group.get_workers()
        worlds = rank_worlds([worker.metadata.node_id for worker in workers])

        def on_all(function: Any, *args: Any) -> list[Any]:
            calls = [
                worker_group.execute_single_async(world.rank, function, world, *args)
                for world in worlds
            ]
            return ray.get(calls)

        try:
            facts = on_all(ray_rank.place_rank, config.network, config.with_deepspeed)
            address, port = worker_group.execute_single(
                0, ray_rank.bind_store, facts[0]["address"], config.network
            )
            on_all(ray_rank.join_group, address, port, config.network, config.with_deepspeed)
            worker_group.execute_single(0, ray_rank.say_ranks, facts)
        except RayTaskError as error:
            if isinstance(error.cause, RaydistError):
                raise error.cause from None
            raise

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Take the process groups down, so that no rank warns about a peer that left."""
        calls = worker_group.execute_async(ray_rank.leave_group)
        ray.wait(calls, num_returns=len(calls), timeout=_LEAVE_TIMEOUT_S)
