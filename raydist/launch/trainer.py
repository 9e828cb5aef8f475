# SPDX-License-Identifier: Apache-2.0
"""The TorchTrainer: Ray Train V2 with an early first group and raydist's failure policy.

Uses inner classes of Ray Train, whose version is pinned to 2.60 (see DECISIONS.md).
"""

from __future__ import annotations

from typing import Any, ClassVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.v2._internal.callbacks import WorkingDirectorySetupCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.callback import RayTrainCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import (
    DefaultPlacementGroupHandle,
)
from ray.train.v2._internal.execution.worker_group.worker import Worker
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import (
    ControllerError,
    PreemptionError,
    TrainingFailedError,
    WorkerGroupError,
)
from ray.train.v2.torch.torch_trainer import TorchTrainer

from raydist.errors import FailureKind, RankFailedError, RaydistError
from raydist.fault import RankReport, decide
from raydist.launch.backend import RaydistConfig
from raydist.launch.events import write_event


class RaydistTrainer(TorchTrainer):
    """TorchTrainer over ``RaydistConfig``; neither driver nor controller imports torch."""

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
        # TorchTrainer's own constructor only adds a TorchConfig, and imports torch for it.
        DataParallelTrainer.__init__(
            self,
            train_loop_per_worker=train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=backend_config,
            scaling_config=scaling_config,
            run_config=run_config,
        )
        self._max_worker_failures = max_worker_failures

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        # The cleaner (an actor process of 3 s) frees a placement group whose controller died;
        # ours belongs to the driver and goes with it. Ranks keep the driver's directory.
        left_out = (PlacementGroupCleanerCallback, WorkingDirectorySetupCallback)
        callbacks = super()._create_default_callbacks()
        return [c for c in callbacks if not isinstance(c, left_out)]

    def _initialize_and_run_controller(self, **arguments: Any) -> Result:
        workers = self.scaling_config.num_workers
        arguments["failure_policy"] = BudgetPolicy(
            self.run_config.failure_config,
            world_size=workers if isinstance(workers, int) else workers[1],
            max_failures=self._max_worker_failures,
        )
        controller = ray.remote(
            num_cpus=0,
            label_selector={ray._raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()},
            runtime_env={"env_vars": get_env_vars_to_propagate()},
        )(RaydistController)
        actor: ActorHandle[Any] = controller.remote(**arguments)
        ray.get(actor.run.remote())
        return ray.get(actor.get_result.remote())


class AdoptingWorkerGroup(WorkerGroup):
    """A worker group whose first life takes over the workers that the driver started."""

    _adopted: ClassVar[bool] = False

    def _start_impl(self, worker_group_state_builder: Any) -> None:
        try:
            super()._start_impl(worker_group_state_builder)
        finally:
            AdoptingWorkerGroup._adopted = True  # In this controller's process.

    def _early(self) -> Any:
        config = self._train_run_context.backend_config
        if self._adopted or not isinstance(config, RaydistConfig):
            return None
        return config.early_group

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Any:
        early = self._early()
        if early is None:
            return super()._create_placement_group(scaling_config, worker_group_context)
        return DefaultPlacementGroupHandle(early.placement_group)

    def _create_workers(
        self, num_workers: int, placement_group: Any, resources_per_worker: Any, **rest: Any
    ) -> list[Worker]:
        early = self._early()
        if early is None or len(early.actors) != num_workers:
            return super()._create_workers(
                num_workers, placement_group, resources_per_worker, **rest
            )
        facts = ray.get([actor.get_metadata.remote() for actor in early.actors])
        workers = [
            Worker(actor, fact, resources_per_worker, placement_group_bundle_index=index)
            for index, (actor, fact) in enumerate(zip(early.actors, facts, strict=True))
        ]
        return WorkerGroup._assign_worker_ranks(workers)


class RaydistController(TrainController):
    """Ray Train's controller over ``AdoptingWorkerGroup``."""

    worker_group_cls = AdoptingWorkerGroup


class BudgetPolicy(FailurePolicy):
    """Ray Train's view of ``raydist.fault.decide``; runs in the controller."""

    def __init__(
        self, failure_config: FailureConfig, *, world_size: int, max_failures: int
    ) -> None:
        super().__init__(failure_config)
        self._world_size = world_size
        self._max_failures = max_failures
        self._failures = 0
        self._previous: dict[int, RankReport] | None = None

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        """Restart the group or end the run."""
        self._failures += 1
        reports = reports_of(training_failed_error)
        decision = decide(
            reports,
            world_size=self._world_size,
            previous=self._previous,
            failures=self._failures,
            max_failures=self._max_failures,
        )
        self._previous = reports
        if decision.action == "restart":
            write_event("say", decision.reason)
            return FailureDecision.RETRY
        return FailureDecision.RAISE


def reports_of(error: TrainingFailedError) -> dict[int, RankReport]:
    """Return what each rank reported, from Ray Train's error."""
    if isinstance(error, ControllerError):
        cause = error.controller_failure
        if isinstance(cause, RaydistError):
            return {0: RankReport(kind=cause.kind, error=str(cause), step=None)}
        lost = RankReport(kind=FailureKind.WORKER_LOST, error=type(cause).__name__, step=None)
        return {0: lost}
    if isinstance(error, PreemptionError) and not isinstance(error, WorkerGroupError):
        return {0: RankReport(kind=FailureKind.WORKER_LOST, error="preempted", step=None)}
    failures = getattr(error, "worker_failures", {})
    return {rank: _report(failure) for rank, failure in failures.items()}


def _report(failure: BaseException) -> RankReport:
    found = find_raydist_error(failure)
    if isinstance(found, RankFailedError):
        return RankReport(
            kind=found.kind, error=found.error, step=found.step, is_collateral=found.is_collateral
        )
    if found is not None:
        return RankReport(kind=found.kind, error=str(found), step=None)
    if isinstance(failure, RayActorError) or isinstance(failure.__cause__, RayActorError):
        return RankReport(kind=FailureKind.WORKER_LOST, error=type(failure).__name__, step=None)
    return RankReport(kind=FailureKind.WORKER_LOST, error=type(failure).__name__, step=None)


def find_raydist_error(error: BaseException | None) -> RaydistError | None:
    """Return the first RaydistError in a chain of causes and Ray's wrappers."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, RaydistError):
            return error
        inner = getattr(error, "cause", None) or getattr(error, "_base_exc", None)
        error = inner if isinstance(inner, BaseException) else error.__cause__
    return None
