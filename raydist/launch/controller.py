# SPDX-License-Identifier: Apache-2.0
"""What runs in Ray Train's controller: adopting the early workers, and the failure policy.

Uses inner classes of Ray Train, whose version is pinned to 2.60 (see DECISIONS.md).
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

import ray
from ray.exceptions import RayActorError
from ray.train import FailureConfig
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.context import DistributedContext
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import (
    DefaultPlacementGroupHandle,
)
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus
from ray.train.v2._internal.execution.worker_group.worker import Worker
from ray.train.v2.api.exceptions import (
    ControllerError,
    PreemptionError,
    TrainingFailedError,
    WorkerGroupError,
)

from raydist.errors import FailureKind, RankFailedError, RaydistError, WorkerLostError
from raydist.fault import RankReport, decide
from raydist.launch.backend import RaydistConfig
from raydist.launch.early_group import EarlyGroup, place_of, reserve, start_workers
from raydist.launch.events import write_event
from raydist.launch.ranking import rank_group

_HEAR_ALL_S, _HEAR_AGAIN_S = 2.0, 0.1


class AdoptingWorkerGroup(WorkerGroup):
    """A worker group whose first life takes over the workers that the driver started."""

    _adopted: ClassVar[bool] = False

    def _start_impl(self, worker_group_state_builder: Any) -> None:
        try:
            super()._start_impl(worker_group_state_builder)
        finally:
            AdoptingWorkerGroup._adopted = True  # In this controller's process.

    @property
    def _config(self) -> RaydistConfig:
        config = self._train_run_context.backend_config
        if not isinstance(config, RaydistConfig):
            raise TypeError(f"a RaydistConfig was expected, not {type(config).__name__}")
        return config

    def _early(self) -> EarlyGroup | None:
        return None if self._adopted else self._config.early_group

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Any:
        early = self._early()
        group = early.placement_group if early else reserve(self._config.placement)
        return DefaultPlacementGroupHandle(group)

    def _create_workers(
        self, num_workers: int, placement_group: Any, resources_per_worker: Any, **rest: Any
    ) -> list[Worker]:
        placement, early = self._config.placement, self._early()
        if early is not None:
            actors = early.actors
        else:
            actors = start_workers(
                placement,
                placement_group,
                with_deepspeed=self._config.with_deepspeed,
                worker_class=self._worker_cls,
                runtime_env=self._get_worker_runtime_env(
                    custom_runtime_env=self._train_run_context.run_config.worker_runtime_env or {}
                ),
            )
        try:
            facts = ray.get([actor.get_metadata.remote() for actor in actors])
        except RayActorError as error:
            for actor in actors:
                ray.kill(actor)
            raise WorkerGroupStartupFailedError(
                f"A worker died while it started: {error}"
            ) from error
        workers = [
            Worker(
                actor,
                fact,
                resources_per_worker,
                placement_group_bundle_index=placement.bundle_of(index),
            )
            for index, (actor, fact) in enumerate(zip(actors, facts, strict=True))
        ]
        return _ranked(workers)

    def poll_status(self, timeout: float | None = None) -> WorkerGroupPollStatus:
        """Poll; where a rank's code has failed, let the others say the same first.

        The ranks of one error end milliseconds apart, and whether all raised it decides on a
        restart. A lost rank is not waited on.
        """
        status = super().poll_status(timeout)
        deadline = time.monotonic() + _HEAR_ALL_S
        while _is_half_heard(status) and time.monotonic() < deadline:
            time.sleep(_HEAR_AGAIN_S)
            status = super().poll_status(timeout)
        return status


def _ranked(workers: list[Worker]) -> list[Worker]:
    """Return the workers in rank order, each with its place."""
    places = [place_of(w.metadata, bundle=w.placement_group_bundle_index or 0) for w in workers]
    group = rank_group(places)
    ordered = [workers[index] for index in group.order]
    for worker, world in zip(ordered, group.worlds, strict=True):
        worker.distributed_context = DistributedContext(
            world_rank=world.rank,
            world_size=world.world_size,
            local_rank=world.local_rank,
            local_world_size=world.local_world_size,
            node_rank=world.node_rank,
        )
    return ordered


def _is_half_heard(status: WorkerGroupPollStatus) -> bool:
    kinds = {_report(error).kind for error in status.errors.values()}
    return kinds == {FailureKind.USER_CODE} and not status.finished


class RaydistController(TrainController):
    """Ray Train's controller over ``AdoptingWorkerGroup``."""

    worker_group_cls = AdoptingWorkerGroup


class ReservedScalingPolicy(FixedScalingPolicy):
    """A fixed group whose placement group is all that the autoscaler needs to see.

    Ray Train would tell the autoscaler once more, through an actor process of its own.
    """

    def after_controller_start(self, train_run_context: Any) -> None:
        """Start nothing."""

    def _maybe_send_resource_request(self) -> None:
        return


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
        write_event("say", decision.reason)
        if decision.action == "restart":
            return FailureDecision.RETRY
        return FailureDecision.RAISE


def reports_of(error: TrainingFailedError) -> dict[int, RankReport]:
    """Return what each rank reported, from Ray Train's error."""
    if isinstance(error, ControllerError):
        cause = error.controller_failure
        if isinstance(cause, RaydistError):
            return {0: RankReport(kind=cause.kind, error=str(cause), step=None)}
        # No worker group came up: nodes are gone, or too few came in time.
        lost = RankReport(kind=FailureKind.WORKER_LOST, error=type(cause).__name__, step=None)
        return {0: lost}
    if isinstance(error, PreemptionError) and not isinstance(error, WorkerGroupError):
        return {0: RankReport(kind=FailureKind.WORKER_LOST, error="preempted", step=None)}
    failures = getattr(error, "worker_failures", {})
    return {rank: _report(failure) for rank, failure in failures.items()}


def error_of(error: TrainingFailedError, *, max_failures: int) -> RaydistError:
    """Return what ended a run: a rank's own error, or else that ranks were lost."""
    failures = dict(sorted(getattr(error, "worker_failures", {}).items()))
    controller = getattr(error, "controller_failure", None)
    found = [find_raydist_error(e) for e in (*failures.values(), controller)]
    own = [e for e in found if e is not None and not getattr(e, "is_collateral", False)]
    if own:
        return min(own, key=lambda e: isinstance(e, RankFailedError))  # Named ones say more.
    lost = [rank for rank, e in failures.items() if find_raydist_error(e) is None]
    if lost:
        what = f"{'Rank' if len(lost) == 1 else 'Ranks'} {', '.join(map(str, lost))} died"
    else:
        what = str(next((e for e in found if e is not None), error)).strip().splitlines()[-1]
    return WorkerLostError(
        problem=f"{what}, and fault.max_worker_failures={max_failures} restarts are spent.",
        way_out="Look into the run's log for why; the run resumes from its last commit when it is "
        "started again.",
    )


def _report(failure: BaseException) -> RankReport:
    found = find_raydist_error(failure)
    if isinstance(found, RankFailedError):
        return RankReport(
            kind=found.kind, error=found.error, step=found.step, is_collateral=found.is_collateral
        )
    if found is not None:
        return RankReport(kind=found.kind, error=str(found), step=None)
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
