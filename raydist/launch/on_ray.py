# SPDX-License-Identifier: Apache-2.0
"""A run on Ray: check, connect, place, train through the TorchTrainer, summarize."""

from __future__ import annotations

import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from raydist.checkpoint.runs import write_run
from raydist.clock import SystemClock
from raydist.config.cli import Request
from raydist.data import prepare
from raydist.errors import (
    CapacityError,
    ClusterError,
    InterruptedRunError,
    RaydistError,
    WorkerLostError,
)
from raydist.launch import cluster
from raydist.launch.console import Console
from raydist.launch.launcher import RunResult
from raydist.launch.placement import Placement, plan_placement
from raydist.launch.preflight import Prepared, batch_for, prepare_request, source_revision
from raydist.launch.summary import result_of, summarize, write_curve
from raydist.train.job import Job

if TYPE_CHECKING:
    from raydist.launch.early_group import EarlyGroup

_SAY_WAITING_EVERY_S = 10.0


def run_on_ray(job: Job, request: Request) -> RunResult:
    """Train on the cluster that RAY_ADDRESS names, or on this machine.

    Raises:
        RaydistError: Its kind says what failed; bad requests before a machine is asked for.
    """
    clock = SystemClock()
    prepared = prepare_request(request, clock=clock)
    config = prepared.config
    address = cluster.cluster_address()
    console = Console(progress_every_s=config.metrics.progress_every_s)
    if request.ds_report is not None:
        console.say(request.ds_report.render())
    if prepared.state.step >= config.num_steps:
        console.say(
            f"run {config.name} is complete at step {prepared.state.step}: nothing to train. "
            "Choose another --name for a new run."
        )
        console.close(None, "")
        return result_of(prepared.store, prepared.run_url)
    driver = f"{socket.gethostname()}-{uuid.uuid4().hex[:12]}"
    started = False
    try:
        with _termination_as_interrupt(), cluster.connected(address):
            console.take_over_worker_output()
            placement = plan_placement(config.scaling, cluster.view())
            batch = batch_for(request, config, placement.workers)
            console.say(
                f"run {config.name}: {placement.describe()}, global batch "
                f"{batch.global_batch_size} = {placement.workers} ranks x "
                f"{batch.micro_batch_size} x {batch.gradient_accumulation_steps} accumulation"
            )
            early = _start_workers(prepared, placement)
            started = True
            _prepare_storage(prepared, console, clock)
            _wait_for_workers(early, placement, config.scaling.start_timeout_s, console)
            _fit(job, request, prepared, placement, early, driver)
    finally:
        curve_store = prepared.store if started else None
        if started:
            write_curve(prepared.store, config)
        log = console.close(curve_store, f"logs/driver-{driver}.log")
        if not started and Path(log).exists():
            Path(log).unlink()
    print(summarize(prepared.store, config, prepared.run_url, log), flush=True)
    return result_of(prepared.store, prepared.run_url)


def _start_workers(prepared: Prepared, placement: Placement) -> EarlyGroup:
    from raydist.launch.early_group import start_early_group

    scaling = prepared.config.scaling
    wanted = scaling.accelerator_type
    labels = {"ray.io/accelerator-type": wanted} if wanted else {}
    return start_early_group(
        placement,
        strategy="PACK",
        label_selector=[labels] * placement.workers,
        with_deepspeed=prepared.config.strategy == "zero3",
    )


def _prepare_storage(prepared: Prepared, console: Console, clock: SystemClock) -> None:
    """Write what a run needs before its first step; the first writes of a start."""
    from raydist.data.ray_pieces import map_with_ray_data
    from raydist.train.versions import versions

    write_run(
        prepared.store,
        prepared.config,
        versions=versions(),
        revision=source_revision(),
        clock=clock,
    )
    if not prepared.source.is_prepared:
        begun = clock.monotonic_s()
        manifest = prepare(prepared.source, map_with_ray_data)
        console.say(
            f"corpus {manifest.source}: {manifest.num_documents} documents, "
            f"{manifest.num_tokens:,} tokens, prepared in {clock.monotonic_s() - begun:.1f} s"
        )


def _wait_for_workers(
    early: EarlyGroup, placement: Placement, timeout_s: float, console: Console
) -> None:
    """Wait for the reservation, saying what is waited for.

    Raises:
        CapacityError: It did not come in time.
    """
    deadline = time.monotonic() + timeout_s
    while not early.placement_group.wait(min(_SAY_WAITING_EVERY_S, timeout_s)):
        view = cluster.view()
        name = "GPU" if placement.uses_gpus else "CPU"
        asked = placement.resources_per_worker[name] * placement.workers
        if time.monotonic() >= deadline:
            raise CapacityError(
                resource=name,
                asked=asked,
                free=view.free.get(name, 0),
                could_scale_to=view.could_scale_to.get(name, 0),
                way_out=f"The nodes did not come within scaling.start_timeout_s={timeout_s:g}: "
                "raise it, lower scaling.workers, or free the cluster.",
            )
        console.say(
            f"waiting for {placement.describe()}: {view.free.get(name, 0):g} {name} free of "
            f"{view.total.get(name, 0):g}, could scale to {view.could_scale_to.get(name, 0):g}"
        )


def _fit(
    job: Job,
    request: Request,
    prepared: Prepared,
    placement: Placement,
    early: EarlyGroup,
    driver: str,
) -> None:
    from ray.exceptions import RayError
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.exceptions import TrainingFailedError

    from raydist.launch.backend import RaydistConfig
    from raydist.launch.controller import find_raydist_error
    from raydist.launch.ray_rank import train_rank
    from raydist.launch.ray_storage import ray_storage
    from raydist.launch.trainer import RaydistTrainer
    from raydist.train.task import RankTask

    config = prepared.config
    task = RankTask(
        job=replace(job, recipes=job.recipes[:1]),
        config=config,
        driver=driver,
        takeover=request.takeover,
        corpus_url=prepared.source.url,
    )
    trainer = RaydistTrainer(
        train_rank,
        train_loop_config={"task": task},
        backend_config=RaydistConfig(
            network=config.network,
            with_deepspeed=config.strategy == "zero3",
            early_group=early,
        ),
        scaling_config=ScalingConfig(
            num_workers=placement.workers,
            use_gpu=placement.uses_gpus,
            resources_per_worker=placement.resources_per_worker,
            accelerator_type=config.scaling.accelerator_type,
        ),
        run_config=RunConfig(
            name=driver,
            failure_config=FailureConfig(max_failures=config.fault.max_worker_failures),
            **ray_storage(prepared.run_url),
        ),
        max_worker_failures=config.fault.max_worker_failures,
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        found = _first_raydist_error(error) or find_raydist_error(error)
        if found is not None:
            raise found from None
        raise WorkerLostError(
            problem=str(error).strip().splitlines()[-1],
            way_out="The log named below has the workers' output; raise "
            "fault.max_worker_failures for machines that come and go.",
        ) from error
    except RayError as error:
        raise ClusterError(
            problem=f"Ray ended the run: {str(error).strip().splitlines()[0]}",
            way_out="The run resumes from its last commit when it is started again.",
        ) from error


def _first_raydist_error(error: Any) -> RaydistError | None:
    from raydist.launch.controller import find_raydist_error

    failures = getattr(error, "worker_failures", None) or {}
    found = [find_raydist_error(failure) for _, failure in sorted(failures.items())]
    controller = find_raydist_error(getattr(error, "controller_failure", None))
    own = [e for e in [*found, controller] if e is not None]
    first_hand = [e for e in own if not getattr(e, "is_collateral", False)]
    return next(iter(first_hand or own), None)


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Let SIGTERM unwind like Ctrl-C, so that what was started is stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise InterruptedRunError(
            problem=f"Stopped by {signal.Signals(number).name}.",
            way_out="The last committed checkpoint stands.",
        )

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
