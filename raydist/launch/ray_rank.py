# SPDX-License-Identifier: Apache-2.0
"""What runs inside a Ray Train worker around ``raydist.train.run_rank``.

Importable without torch: the controller refers to these functions, the workers run them.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray.train

from raydist.clock import SystemClock
from raydist.config import NetworkConfig
from raydist.errors import (
    ClusterError,
    RankFailedError,
    RankUnreachableError,
    RaydistError,
)
from raydist.launch.cluster import session_folder
from raydist.launch.events import RowReporter, write_event
from raydist.launch.rank_lines import rank_facts
from raydist.network import NodeChoice, NodeNetwork, RdmaKind, network_environment
from raydist.world import World

if TYPE_CHECKING:
    from raydist.train.task import RankTask

logger = logging.getLogger(__name__)

_PORT_WAIT_S = 5.0
_MEET_TIMEOUT_S = 25.0  # Every rank is up and imported by then; a node that is not answers never.
_REPORT_WAIT_S = 30.0

_world: World | None = None
_store: Any = None  # Rank 0's rendezvous server lives as long as the process.


def preload(with_deepspeed: bool) -> None:
    """Import what a rank needs; for early workers while other processes still start."""
    # Collections would take a quarter of the time of these imports.
    gc.disable()
    try:
        from raydist.train.environment import quiet_libraries, select_accelerator

        select_accelerator()
        quiet_libraries()
        import torch._dynamo  # noqa: F401
        import transformers  # noqa: F401

        import raydist.train.rank

        if with_deepspeed:
            import raydist.train.zero
        else:
            import raydist.train.ddp  # noqa: F401
        gc.freeze()
    finally:
        gc.enable()


def be_ready() -> None:
    """Answer, once what was asked of this worker before is done: its imports."""


def placed_world() -> World:
    """Return the place that ``place_rank`` gave this worker.

    Raises:
        ClusterError: It did not.
    """
    if _world is None:
        raise ClusterError(problem="The worker was not placed before it was to work.")
    return _world


def place_rank(
    world: World,
    choice: NodeChoice,
    node: NodeNetwork,
    network: NetworkConfig,
    gpus_of_node: Sequence[str],
    shared_rdma: frozenset[RdmaKind],
) -> dict[str, Any]:
    """Place this worker: its devices, its interface, its variables, its threads.

    Returns:
        Facts to show.
    """
    global _world
    _world = world
    if gpus_of_node:
        # All of the node's, so that neighbours reach each other's; rank order is theirs.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus_of_node)
    from raydist.train.environment import quiet_libraries, select_accelerator, set_num_threads

    select_accelerator()  # Before torch.
    quiet_libraries()
    import torch

    implied = network_environment(
        choice,
        node,
        num_nodes=world.num_nodes,
        backend="nccl" if torch.cuda.is_available() else "gloo",
        debug=network.debug,
        trace_prefix=f"{session_folder()}/logs/raydist-collectives-rank-",
        shared_rdma=shared_rdma,
    )
    os.environ.update(implied.values)
    for line in implied.explain():
        logger.info("rank %d: %s", world.rank, line)
    return rank_facts(
        world,
        choice,
        implied,
        device=f"GPU {gpus_of_node[world.local_rank]}" if gpus_of_node else "CPU",
        num_threads=set_num_threads(),
    )


def bind_store(world_address: str, network: NetworkConfig) -> tuple[str, int]:
    """Bind the rendezvous store on rank 0; a free port is chosen by binding it.

    Raises:
        ClusterError: network.master_port is taken.
    """
    global _store
    from datetime import timedelta

    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    deadline = time.monotonic() + _PORT_WAIT_S
    while True:
        try:
            _store = TCPStore(
                world_address,
                network.master_port or 0,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=_MEET_TIMEOUT_S),
            )
            break
        except dist.DistNetworkError as error:
            if time.monotonic() < deadline:
                time.sleep(0.5)  # A rank 0 that is being replaced may still hold the port.
                continue
            raise ClusterError(
                problem=f"The rendezvous store cannot be bound on {world_address} port "
                f"{network.master_port or 0}: {_first_line(error)}",
                way_out="Set network.master_port to a port that is free on rank 0's node, or leave "
                "it out."
                if network.master_port
                else "Check that rank 0's node may listen on that address.",
            ) from error
    return world_address, _store.port


def join_group(
    world: World, address: str, port: int, network: NetworkConfig, with_deepspeed: bool
) -> None:
    """Join the process group and DeepSpeed's communication on top of it.

    Raises:
        RankUnreachableError: Rank 0's store cannot be reached.
    """
    from datetime import timedelta

    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    from raydist.train.rendezvous import choose_device, join, rank_environment

    os.environ.update(rank_environment(world, master_addr=address, master_port=port))
    store = _store
    if world.rank != 0:
        try:
            store = TCPStore(
                address, port, is_master=False, timeout=timedelta(seconds=_MEET_TIMEOUT_S)
            )
        except dist.DistError as error:
            raise RankUnreachableError(
                problem=f"Rank {world.rank} on {socket.gethostname()} cannot reach rank 0 at "
                f"{address}:{port}: {_first_line(error)}",
                way_out="Check the network between these nodes, or set network.interface.",
            ) from error
    join(
        world,
        device=choose_device(world),
        store=store,
        timeout_s=network.timeout_s,
        meet_timeout_s=_MEET_TIMEOUT_S,
        with_deepspeed=with_deepspeed,
    )


def say(lines: Sequence[str]) -> None:
    """Show lines to the user."""
    for line in lines:
        write_event("say", line)


def leave_group() -> None:
    """Destroy the process groups."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def train_rank(settings: dict[str, Any]) -> None:
    """Run one rank: the train function of every Ray Train worker.

    Raises:
        RaydistError: As it was raised.
        RankFailedError: For anything else, with where it came from.
        ClusterError: The worker was never placed.
    """
    from raydist.train.failure import rank_failure
    from raydist.train.rank import Hooks, run_rank
    from raydist.train.rendezvous import TorchGroup, choose_device

    task: RankTask = settings["task"]
    world = placed_world()
    is_main = world.is_main
    last_step: list[int] = []
    reporter = RowReporter(
        task.config, SystemClock(), lambda event: write_event("row", event.to_json_dict())
    )

    def row(values: dict[str, Any]) -> None:
        last_step[:] = [values["step"]]
        if is_main:
            reporter(values)

    commits = _CommitReporter(task.config.name, is_main=is_main)
    try:
        run_rank(
            task,
            world,
            device=choose_device(world),
            group=TorchGroup(task.config.network.timeout_s),
            hooks=Hooks(
                row=row, say=lambda text: write_event("say", text), committed=commits.committed
            ),
        )
    except RaydistError:
        raise
    except Exception as error:
        step = last_step[0] + 1 if last_step else None
        failure: RankFailedError = rank_failure(error, rank=world.rank, step=step)
        raise failure from None
    finally:
        commits.close()


class _CommitReporter:
    """Tells Ray Train of commits from a thread: its report blocks until the next poll.

    Every rank reports every commit, in order, as Ray Train requires; rank 0 adds a pointer.
    """

    def __init__(self, run: str, *, is_main: bool) -> None:
        self._run = run
        self._is_main = is_main
        self._queue: queue.Queue[tuple[int, str] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._report, name="raydist-report", daemon=True)
        self._thread.start()

    def committed(self, step: int, manifest_key: str) -> None:
        """Queue one commit."""
        self._queue.put((step, manifest_key))

    def close(self) -> None:
        """Wait for the queued reports, but not for ever: Ray's barrier has no time limit.

        A report that fails on one rank leaves the others in it; the commits stand regardless.
        """
        self._queue.put(None)
        self._thread.join(_REPORT_WAIT_S)
        if self._thread.is_alive():
            logger.warning("Ray Train was not told of every commit of run %s", self._run)

    def _report(self) -> None:
        while (item := self._queue.get()) is not None:
            step, manifest_key = item
            facts = {"run": self._run, "step": step, "manifest": manifest_key}
            if not self._is_main:
                ray.train.report(facts)
                continue
            # Ends with the cluster: the rank may be killed before this block ends.
            with tempfile.TemporaryDirectory(dir=session_folder()) as folder:
                Path(folder, "pointer.json").write_text(json.dumps(facts))
                ray.train.report(facts, checkpoint=ray.train.Checkpoint.from_directory(folder))


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
