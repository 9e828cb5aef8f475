# SPDX-License-Identifier: Apache-2.0
"""The same run under torchrun or the deepspeed launcher: this process is one rank, no Ray."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace

from raydist.checkpoint.runs import write_run
from raydist.clock import SystemClock
from raydist.config.cli import Request
from raydist.data import map_in_process, prepare
from raydist.launch.events import RowReporter
from raydist.launch.launcher import RunResult
from raydist.launch.preflight import Prepared, batch_for, prepare_request, source_revision
from raydist.launch.summary import result_of, summarize, write_curve
from raydist.metrics.progress import ProgressPrinter
from raydist.storage import open_store
from raydist.train.environment import quiet_libraries, select_accelerator, set_num_threads
from raydist.train.job import Job
from raydist.train.task import RankTask
from raydist.train.versions import versions


def run_ranked(job: Job, request: Request) -> RunResult | None:
    """Be one rank of a run that another launcher has started; rank 0 returns the result.

    Raises:
        RaydistError: The same on every rank where it concerns the request.
    """
    select_accelerator()
    quiet_libraries()
    # torch only from here on, after the accelerator is chosen.
    from raydist.train.rank import Hooks, agree, run_rank
    from raydist.train.rendezvous import (
        TorchGroup,
        choose_device,
        join,
        rank_environment,
        world_from_environment,
    )

    world = world_from_environment(os.environ)
    os.environ.update(
        rank_environment(
            world,
            master_addr=os.environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=int(os.environ.get("MASTER_PORT", "29500")),
        )
    )
    set_num_threads()
    timeout_s = request.config.network.timeout_s
    device = choose_device(world)
    join(
        world,
        device=device,
        store=None,
        timeout_s=timeout_s,
        with_deepspeed=request.config.strategy == "zero3",
    )
    group = TorchGroup(timeout_s)
    clock = SystemClock()

    def check() -> tuple[str, str, int]:
        prepared = prepare_request(request, clock=clock)
        batch_for(request, prepared.config, world.world_size)
        if prepared.state.step < prepared.config.num_steps:
            _prepare_storage(prepared, clock)
        return prepared.config.storage, prepared.source.url, prepared.state.step

    storage, corpus_url, step = agree(group, check)
    config = replace(request.config, storage=storage)
    run_url = f"{storage.rstrip('/')}/{config.name}"
    store = open_store(run_url)
    printer = ProgressPrinter(
        sys.stdout,
        is_terminal=sys.stdout.isatty(),
        every_s=config.metrics.progress_every_s,
        clock=clock,
    )
    if step < config.num_steps:
        task = RankTask(
            job=job,
            config=config,
            driver=_driver(),
            takeover=request.takeover,
            corpus_url=corpus_url,
        )
        hooks = Hooks(
            row=RowReporter(config, clock, printer.show),
            say=printer.message,
            committed=lambda step, key: None,
        )
        try:
            run_rank(task, world, device=device, group=group, hooks=hooks)
        finally:
            printer.close()
            if world.is_main:
                write_curve(store, config)
    elif world.is_main:
        printer.message(f"run {config.name} is complete at step {step}: nothing to train")
    _leave()
    if not world.is_main:
        return None
    print(summarize(store, config, run_url, "this terminal"), flush=True)
    return result_of(store, run_url)


def _prepare_storage(prepared: Prepared, clock: SystemClock) -> None:
    write_run(
        prepared.store,
        prepared.config,
        versions=versions(),
        revision=source_revision(),
        clock=clock,
    )
    prepare(prepared.source, map_in_process)


def _driver() -> str:
    # The agent that started the ranks is what two restarts of one run have in common.
    return f"{socket.gethostname()}-{os.environ.get('TORCHELASTIC_RUN_ID', 'ds')}-{os.getppid()}"


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
