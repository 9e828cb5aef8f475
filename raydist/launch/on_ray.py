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
from typing import TYPE_CHECKING

from raydist.clock import SystemClock
from raydist.config.cli import Request
from raydist.data import prepare
from raydist.errors import (
    CapacityError,
    InterruptedRunError,
    WorkerLostError,
)
from raydist.launch import cluster
from raydist.launch.console import Console
from raydist.launch.launcher import RunResult
from raydist.launch.placement import Placement, plan_placement
from raydist.launch.preflight import Prepared, batch_for, prepare_request, source_revision
from raydist.launch.save_signal import saves_on_signal
from raydist.launch.summary import summarize, write_curve
from raydist.storage import open_store
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
    store = open_store(config.run_url)
    address = cluster.cluster_address()
    if prepared.state.step >= config.num_steps:
        print(
            f"run {config.name} is complete at step {prepared.state.step}: nothing to train. "
            "Choose another --name for a new run."
        )
        return summarize(store, config, curve=write_curve(store, config), log="logs/")[0]
    console = Console(progress_every_s=config.metrics.progress_every_s)
    if request.ds_report is not None:
        console.say(request.ds_report.render())
    driver = f"{socket.gethostname()}-{uuid.uuid4().hex[:12]}"
    has_begun = is_done = False
    try:
        # Again on the inside: Ray, once connected, has replaced the first.
        with (
            _termination_as_interrupt(),
            cluster.connected(address, start_timeout_s=config.scaling.start_timeout_s),
            _termination_as_interrupt(),
            saves_on_signal(store),
        ):
            console.take_over_worker_output()
            placement = plan_placement(config.scaling, cluster.view())
            batch = batch_for(request, config, placement.workers)
            console.say(
                f"run {config.name}: {placement.describe()}, global batch "
                f"{batch.global_batch_size} = {placement.workers} ranks x "
                f"{batch.micro_batch_size} x {batch.gradient_accumulation_steps} accumulation"
            )
            console.say(f"reserving {placement.describe_bundles()}")
            early = _start_workers(placement, config.strategy)
            _wait_for_workers(early, placement, config.scaling.start_timeout_s, console)
            has_begun = True
            if not prepared.source.is_prepared:
                _prepare_corpus(prepared, console, clock)
            _fit(job, request, prepared, placement, early, driver)
            is_done = True
    finally:
        # From here on the run has written: its log belongs beside it. Before, nothing stays.
        log = console.close(store if has_begun else None, f"logs/driver-{driver}.log")
        curve = write_curve(store, config) if has_begun else ""
        if has_begun and not is_done:
            print(f"log: {log if Path(log).is_absolute() else f'{config.run_url}/{log}'}")
    result, text = summarize(store, config, curve=curve, log=log)
    print(text, flush=True)
    return result


def _start_workers(placement: Placement, strategy: str) -> EarlyGroup:
    from raydist.launch.early_group import start_early_group

    return start_early_group(placement, with_deepspeed=strategy == "zero3")


def _prepare_corpus(prepared: Prepared, console: Console, clock: SystemClock) -> None:
    from raydist.data.ray_pieces import map_with_ray_data

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
    from raydist.launch.controller import error_of
    from raydist.launch.ray_rank import train_rank
    from raydist.launch.ray_storage import ray_storage
    from raydist.launch.trainer import RaydistTrainer
    from raydist.train.task import RankTask

    config = prepared.config
    task = RankTask(
        job=replace(job, recipes=job.recipes[:1]),
        config=config,
        driver=driver,
        seen_attempt=prepared.seen_attempt,
        takeover=request.takeover,
        allow_config_change=request.allow_config_change,
        corpus_url=prepared.source.url,
        revision=source_revision(),
    )
    trainer = RaydistTrainer(
        train_rank,
        train_loop_config={"task": task},
        backend_config=RaydistConfig(
            network=config.network,
            with_deepspeed=config.strategy == "zero3",
            early_group=early,
            placement=placement,
            preflight=config.scaling.preflight,
            start_timeout_s=config.scaling.start_timeout_s,
        ),
        scaling_config=ScalingConfig(
            num_workers=placement.workers,
            use_gpu=placement.uses_gpus,
            resources_per_worker=placement.resources_per_worker,
        ),
        run_config=RunConfig(
            name=driver,
            failure_config=FailureConfig(max_failures=config.fault.max_worker_failures),
            **ray_storage(config.run_url),
        ),
        max_worker_failures=config.fault.max_worker_failures,
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        raise error_of(error, max_failures=config.fault.max_worker_failures) from None
    except RayError as error:
        raise WorkerLostError(
            problem=f"Ray ended the run: {str(error).strip().splitlines()[0]}",
            way_out="The run resumes from its last commit when it is started again.",
        ) from error


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Let SIGTERM unwind like Ctrl-C, so that what was started is stopped.

    Raises:
        InterruptedRunError: There was a SIGTERM.
        KeyboardInterrupt: There was a Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    is_stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopped
        is_stopped = True
        raise KeyboardInterrupt  # The one exception that gets out of Ray's waits.

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        if not is_stopped:
            raise
        raise InterruptedRunError(
            problem="Stopped by SIGTERM.", way_out="The last committed checkpoint stands."
        ) from None
    finally:
        signal.signal(signal.SIGTERM, previous)
