# SPDX-License-Identifier: Apache-2.0
"""The trainer: Ray Train V2 with early workers and raydist's controller.

Uses inner classes of Ray Train, whose version is pinned to 2.60 (see DECISIONS.md).
"""

from __future__ import annotations

from typing import Any

import ray
from ray.runtime_context import get_runtime_context
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.v2._internal.callbacks import DatasetsCallback, WorkingDirectorySetupCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2.api.callback import RayTrainCallback
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from raydist.launch.backend import RaydistConfig
from raydist.launch.controller import BudgetPolicy, RaydistController, ReservedScalingPolicy


class RaydistTrainer(DataParallelTrainer):
    """Ray Train's TorchTrainer with ``RaydistConfig`` in the place of its TorchConfig.

    TorchTrainer is DataParallelTrainer with a TorchConfig, and importing it imports torch,
    1.2 s each in the driver and the controller that need none (see DECISIONS.md).
    """

    def __init__(
        self,
        train_loop_per_worker: Any,
        *,
        train_loop_config: dict[str, Any],
        backend_config: RaydistConfig,
        scaling_config: ScalingConfig,
        run_config: RunConfig,
        max_worker_failures: int,
    ) -> None:
        super().__init__(
            train_loop_per_worker=train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=backend_config,
            scaling_config=scaling_config,
            run_config=run_config,
        )
        self._max_worker_failures = max_worker_failures

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        # The cleaner (an actor process of 3 s) frees a placement group whose controller died;
        # ours belongs to the driver and goes with it. Data reaches the ranks by position, not
        # through Ray Train's dataset splits, and ranks keep the driver's directory.
        left_out = (PlacementGroupCleanerCallback, DatasetsCallback, WorkingDirectorySetupCallback)
        callbacks = super()._create_default_callbacks()
        return [c for c in callbacks if not isinstance(c, left_out)]

    def _initialize_and_run_controller(self, **arguments: Any) -> Result:
        workers = self.scaling_config.num_workers
        arguments["scaling_policy"] = ReservedScalingPolicy(self.scaling_config)
        arguments["failure_policy"] = BudgetPolicy(
            self.run_config.failure_config or FailureConfig(),
            world_size=workers if isinstance(workers, int) else workers[1],
            max_failures=self._max_worker_failures,
        )
        controller = ray.remote(
            num_cpus=0,
            label_selector={"ray.io/node-id": get_runtime_context().get_node_id()},
            runtime_env={"env_vars": get_env_vars_to_propagate()},
        )(RaydistController)
        actor: Any = controller.remote(**arguments)
        ray.get(actor.run.remote())
        result: Any = ray.get(actor.get_result.remote())
        return result
