# SPDX-License-Identifier: Apache-2.0
"""Workers started by the driver, so that their imports overlap the Train controller's start.

Ray Train starts its controller, then its placement group, then its workers, one after the
other, and each imports for seconds. Here the driver reserves the placement group and starts
the same worker actors at once; the first worker group adopts them. Later groups (after a
failure) are Ray Train's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker
from ray.train.v2._internal.util import bundle_to_remote_args
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raydist.launch import ray_rank
from raydist.launch.placement import Placement


@dataclass
class EarlyGroup:
    """A placement group and the worker actors in its bundles, owned by the driver."""

    placement_group: PlacementGroup
    actors: list[Any]


def start_early_group(
    placement: Placement,
    *,
    strategy: str,
    label_selector: list[dict[str, str]],
    with_deepspeed: bool,
) -> EarlyGroup:
    """Reserve the bundles and start one worker in each; returns without waiting."""
    group = placement_group(
        [placement.resources_per_worker] * placement.workers,
        strategy=strategy,
        bundle_label_selector=label_selector,
    )
    worker = ray.remote(**bundle_to_remote_args(placement.resources_per_worker))(RayTrainWorker)
    actors = []
    for index in range(placement.workers):
        actor = worker.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            )
        ).remote()
        actor.execute.remote(ray_rank.preload, with_deepspeed)
        actors.append(actor)
    return EarlyGroup(placement_group=group, actors=actors)
