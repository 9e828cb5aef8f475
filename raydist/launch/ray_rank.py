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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.train

from raydist.clock import SystemClock
from raydist.config import NetworkConfig
from raydist.errors import (
    ClusterError,
    RankFailedError,
    RankUnreachableError,
    RaydistError,
)
from raydist.launch.events import RowReporter, write_event
from raydist.network import choose_interface, list_interfaces, network_environment
from raydist.world import World

if TYPE_CHECKING:
    from raydist.train.task import RankTask

logger = logging.getLogger(__name__)

_PORT_WAIT_S = 5.0
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


def place_rank(world: World, network: NetworkConfig, with_deepspeed: bool) -> dict[str, Any]:
    """Place this worker: its interface, its variables, its threads. Returns facts to show.

    Raises:
        ClusterError: The interface is not usable.
    """
    global _world
    _world = world
    preload(with_deepspeed)
    from raydist.train.environment import set_num_threads

    host = socket.gethostname()
    choice = choose_interface(
        list_interfaces(),
        node=host,
        node_address=_node_address(),
        num_nodes=world.num_nodes,
        environment=os.environ,
        override=network.interface,
    )
    os.environ.update(
        network_environment(choice, num_nodes=world.num_nodes, environment=os.environ)
    )
    gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return {
        "rank": world.rank,
        "host": host,
        "pid": os.getpid(),
        "device": f"GPU {gpus[0]}" if gpus else "CPU",
        "threads": set_num_threads(),
        "interface": choice.interface,
        "address": choice.address,
        "reason": choice.reason,
    }


def _node_address() -> str:
    """Return the address by which the cluster knows this node."""
    node_id = ray.get_runtime_context().get_node_id()
    return next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node_id)


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
                timeout=timedelta(seconds=network.timeout_s),
            )
            break
        except dist.DistNetworkError as error:
            if time.monotonic() < deadline:
                time.sleep(0.5)  # A rank 0 that is being replaced may still hold the port.
                continue
            raise ClusterError(
                problem=f"The rendezvous store cannot be bound on {world_address} port "
                f"{network.master_port or 0}: {_first_line(error)}",
                way_out="Leave network.master_port out, or name a port that is free on rank 0's "
                "node.",
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
                address, port, is_master=False, timeout=timedelta(seconds=network.timeout_s)
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
        with_deepspeed=with_deepspeed,
    )


def say_ranks(facts: list[dict[str, Any]]) -> None:
    """Show one line per rank: where it is and how it talks."""
    for fact in facts:
        write_event(
            "say",
            "rank {rank}: {host} (pid {pid}), {device}, {threads} threads, {interface} "
            "{address} ({reason})".format(**fact),
        )


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
    if _world is None:
        raise ClusterError(problem="The worker was not placed before its train function ran.")
    is_main = _world.is_main
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
            _world,
            device=choose_device(_world),
            group=TorchGroup(task.config.network.timeout_s),
            hooks=Hooks(
                row=row, say=lambda text: write_event("say", text), committed=commits.committed
            ),
        )
    except RaydistError:
        raise
    except Exception as error:
        step = last_step[0] + 1 if last_step else None
        failure: RankFailedError = rank_failure(error, rank=_world.rank, step=step)
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
            with tempfile.TemporaryDirectory(dir=_session_folder()) as folder:
                Path(folder, "pointer.json").write_text(json.dumps(facts))
                ray.train.report(facts, checkpoint=ray.train.Checkpoint.from_directory(folder))


def _session_folder() -> str:
    """Return where this node's Ray keeps its own files.

    Raises:
        ClusterError: Not in a Ray worker.
    """
    import ray._private.worker

    node = ray._private.worker._global_node
    if node is None:
        raise ClusterError(problem="The worker is not connected to Ray.")
    return node.get_session_dir_path()


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
