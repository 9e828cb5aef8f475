# SPDX-License-Identifier: Apache-2.0
"""The same run under torchrun or the deepspeed launcher: this process is one rank, no Ray."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING, Any

from raydist.clock import SystemClock
from raydist.config.cli import Request
from raydist.data import map_in_process, prepare
from raydist.errors import RankFailedError, RaydistError
from raydist.launch.events import RowReporter
from raydist.launch.launcher import RunResult
from raydist.launch.preflight import Prepared, batch_for, prepare_request, source_revision
from raydist.launch.rank_lines import describe_ranks, rank_facts
from raydist.launch.ranked_network import choose_by_route
from raydist.launch.summary import summarize, write_curve
from raydist.metrics.progress import ProgressPrinter
from raydist.storage import open_store
from raydist.train.environment import quiet_libraries, select_accelerator, set_num_threads
from raydist.train.job import Job
from raydist.train.task import RankTask
from raydist.world import World

if TYPE_CHECKING:
    import torch

_MEET_TIMEOUT_S = 120.0  # The launcher starts the ranks together; their imports differ by seconds.


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
    from raydist.train.rendezvous import TorchGroup, choose_device, world_from_environment

    world = world_from_environment(os.environ)
    device = choose_device(world)
    facts = _join(request, world, device)
    group = TorchGroup(request.config.network.timeout_s)
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
    _say_ranks(printer, group.gather(facts))
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


def _join(request: Request, world: World, device: torch.device) -> dict[str, Any]:
    """Choose this rank's network and join the others; returns what it is to say of itself."""
    from raydist.train.rendezvous import join, rank_environment

    os.environ.update(
        rank_environment(
            world,
            master_addr=os.environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=int(os.environ.get("MASTER_PORT", "29500")),
        )
    )
    config = request.config
    choice, implied = choose_by_route(
        world,
        config.network,
        master_addr=os.environ["MASTER_ADDR"],
        backend="nccl" if device.type == "cuda" else "gloo",
    )
    facts = rank_facts(world, choice, implied, device=str(device), num_threads=set_num_threads())
    join(
        world,
        device=device,
        store=None,
        timeout_s=config.network.timeout_s,
        meet_timeout_s=min(config.network.timeout_s, _MEET_TIMEOUT_S),
        with_deepspeed=config.strategy == "zero3",
    )
    return facts


def _say_ranks(printer: ProgressPrinter, facts: list[dict[str, Any]] | None) -> None:
    for line in describe_ranks(facts or []):
        printer.message(line)


def _driver() -> str:
    # The agent that started the ranks is what two restarts of one run have in common.
    return f"{socket.gethostname()}-{os.environ.get('TORCHELASTIC_RUN_ID', 'ds')}-{os.getppid()}"


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
