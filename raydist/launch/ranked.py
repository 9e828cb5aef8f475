# SPDX-License-Identifier: Apache-2.0
"""The same run under torchrun or the deepspeed launcher: this process is one rank, no Ray."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from raydist.clock import SystemClock
from raydist.config.cli import Request
from raydist.data import map_in_process, prepare
from raydist.errors import RankFailedError, RaydistError
from raydist.launch.events import RowReporter
from raydist.launch.launcher import RunResult
from raydist.launch.preflight import Prepared, batch_for, prepare_request, source_revision
from raydist.launch.summary import summarize, write_curve
from raydist.metrics.progress import ProgressPrinter
from raydist.storage import open_store
from raydist.train.environment import quiet_libraries, select_accelerator, set_num_threads
from raydist.train.job import Job
from raydist.train.task import RankTask


def run_ranked(job: Job, request: Request) -> RunResult | None:
    """Be one rank of a run that another launcher has started; rank 0 returns the result.

    Raises:
        RaydistError: The same on every rank where it concerns the request.
        RankFailedError: The job's own code raised.
    """
    select_accelerator()
    quiet_libraries()
    # torch only from here on, after the accelerator is chosen.
    from raydist.train.failure import rank_failure
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

    def check() -> Prepared:
        prepared = prepare_request(request, clock=clock)
        batch_for(request, prepared.config, world.world_size)
        if prepared.state.step < prepared.config.num_steps:
            prepare(prepared.source, map_in_process)
        return prepared

    prepared = agree(group, check)
    config, step = prepared.config, prepared.state.step
    store = open_store(config.run_url)
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
            seen_attempt=prepared.seen_attempt,
            takeover=request.takeover,
            allow_config_change=request.allow_config_change,
            corpus_url=prepared.source.url,
            revision=source_revision(),
        )
        last_step: list[int] = []
        reporter = RowReporter(config, clock, printer.show)

        def row(values: dict[str, Any]) -> None:
            last_step[:] = [values["step"]]
            if world.is_main:
                reporter(values)

        hooks = Hooks(
            row=row,
            say=printer.message,
            committed=lambda step, key: None,
        )
        try:
            run_rank(task, world, device=device, group=group, hooks=hooks)
        except RaydistError:
            raise
        except Exception as error:
            step = last_step[0] + 1 if last_step else None
            failure: RankFailedError = rank_failure(error, rank=world.rank, step=step)
            raise failure from None
        finally:
            printer.close()
            curve = write_curve(store, config) if world.is_main else ""
    elif world.is_main:
        curve = write_curve(store, config)
        printer.message(f"run {config.name} is complete at step {step}: nothing to train")
    _leave()
    if not world.is_main:
        return None
    result, text = summarize(store, config, curve=curve, log="this terminal")
    print(text, flush=True)
    return result


def _driver() -> str:
    # The agent that started the ranks is what two restarts of one run have in common.
    return f"{socket.gethostname()}-{os.environ.get('TORCHELASTIC_RUN_ID', 'ds')}-{os.getppid()}"


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
