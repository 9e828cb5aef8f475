# SPDX-License-Identifier: Apache-2.0
"""Workers started by the driver, so that their imports overlap the Train controller's start.

Ray Train starts its controller, then its placement group, then its workers, one after the
other, and each imports for seconds. Here the driver reserves the placement group and starts
the same worker actors at once; the first worker group adopts them. Later groups (after a
failure) are made the same way by the controller.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray._raylet import PlacementGroupID
from ray.train.v2._internal.execution.worker_group.worker import ActorMetadata, RayTrainWorker
from ray.train.v2._internal.util import bundle_to_remote_args
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raydist.launch import ray_rank
from raydist.launch.placement import Placement
from raydist.launch.ranking import WorkerPlace

_NAME = "raydist-job-"


@dataclass
class EarlyGroup:
    """A placement group and the worker actors in its bundles, owned by the driver."""

    placement_group: PlacementGroup
    actors: list[Any]


def reserve(placement: Placement) -> PlacementGroup:
    """Ask Ray for the bundles; returns without waiting.

    The reservation is named for the job, so that the next one can release it: Ray ends those of a
    job that ends, but not one that the job's controller makes at that very moment.
    """
    bundles = placement.bundles
    return placement_group(
        bundles,
        strategy=placement.strategy,
        name=f"{_NAME}{ray.get_runtime_context().get_job_id()}-{secrets.token_hex(4)}",
        bundle_label_selector=[placement.labels] * len(bundles),
    )


def place_of(metadata: ActorMetadata, *, bundle: int) -> WorkerPlace:
    """Return where a worker came up, as ranks are ordered by it."""
    return WorkerPlace(
        node_id=metadata.node_id, bundle=bundle, gpu_ids=tuple(map(str, metadata.gpu_ids))
    )


def release_leftovers() -> int:
    """Release reservations of raydist's jobs that have ended; returns how many there were."""
    from ray._private.state import state

    dead = {job["JobID"] for job in state.job_table() if job["IsDead"]}
    leftovers = [
        entry["placement_group_id"]
        for entry in placement_group_table().values()
        if entry["state"] != "REMOVED" and _job_of(entry["name"]) in dead
    ]
    for identity in leftovers:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(identity))))
    return len(leftovers)


def _job_of(name: str) -> str | None:
    return name.removeprefix(_NAME).partition("-")[0] if name.startswith(_NAME) else None


def start_workers(
    placement: Placement,
    group: PlacementGroup,
    *,
    with_deepspeed: bool | None,
    worker_class: type = RayTrainWorker,
    runtime_env: dict[str, Any] | None = None,
) -> list[Any]:
    """Start one worker actor for each rank in its bundle; returns without waiting.

    Args:
        placement: Decides which bundle.
        group: The bundles.
        with_deepspeed: Whether training will use DeepSpeed, so that the imports can begin; None
            imports nothing ahead.
        worker_class: Of the actors.
        runtime_env: Of the actors.
    """
    options: dict[str, Any] = bundle_to_remote_args(placement.resources_per_worker)
    if runtime_env is not None:
        options["runtime_env"] = runtime_env
    remote: Callable[..., Any] = ray.remote(**options)
    worker = remote(worker_class)
    actors = []
    for index in range(placement.workers):
        actor = worker.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=placement.bundle_of(index)
            )
        ).remote()
        if with_deepspeed is not None:
            actor.execute.remote(ray_rank.preload, with_deepspeed)
        actors.append(actor)
    return actors


def start_early_group(placement: Placement, *, with_deepspeed: bool) -> EarlyGroup:
    """Reserve the bundles and start one worker in each; returns without waiting."""
    release_leftovers()
    group = reserve(placement)
    actors = start_workers(placement, group, with_deepspeed=with_deepspeed)
    return EarlyGroup(placement_group=group, actors=actors)
