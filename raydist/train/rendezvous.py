# SPDX-License-Identifier: Apache-2.0
"""Ranks meet: the process group, DeepSpeed's communication on top of it, and its checks."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from raydist.errors import ClusterError, RankUnreachableError
from raydist.train.time_limits import hold_time_limits
from raydist.world import World

logger = logging.getLogger(__name__)


def rank_environment(world: World, *, master_addr: str, master_port: int) -> dict[str, str]:
    """Return the variables by which torch, DeepSpeed and their users know a rank's place."""
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_world_size),
        "LOCAL_SIZE": str(world.local_world_size),  # DeepSpeed's name for it
        "GROUP_RANK": str(world.node_rank),
        "NODE_RANK": str(world.node_rank),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
    }


def world_from_environment(environment: Mapping[str, str]) -> World:
    """Read a rank's place from what torchrun or the deepspeed launcher set.

    Raises:
        ClusterError: A variable is missing or is not a number.
    """
    try:
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_rank = int(environment["LOCAL_RANK"])
        local = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or world_size
        local_world_size = int(local)
        num_nodes = int(environment.get("GROUP_WORLD_SIZE", -(-world_size // local_world_size)))
        node_rank = int(environment.get("GROUP_RANK", rank // local_world_size))
    except (KeyError, ValueError) as error:
        raise ClusterError(
            problem=f"The launcher's environment does not place this rank: {error}.",
            way_out="Start with torchrun, the deepspeed launcher, or without RANK set.",
        ) from error
    return World(
        world_size=world_size,
        rank=rank,
        local_world_size=local_world_size,
        local_rank=local_rank,
        num_nodes=num_nodes,
        node_rank=node_rank,
    )


def choose_device(world: World) -> torch.device:
    """Return this rank's device and make it current."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device


def join(
    world: World,
    *,
    device: torch.device,
    store: Any,
    timeout_s: float,
    with_deepspeed: bool,
    meet_timeout_s: float | None = None,
) -> None:
    """Build the process group and, for ZeRO, DeepSpeed's communication over it.

    Called on every rank before any user code. Every group gets the one time limit.

    Args:
        world: This rank's place.
        device: Decides the backend: NCCL for CUDA, else gloo.
        timeout_s: Time limit of one collective.
        meet_timeout_s: How long ranks may take to find each other; None allows ``timeout_s``.
        with_deepspeed: Whether DeepSpeed's communication is built on top.
        store: Rendezvous store (a torch TCPStore); None reads MASTER_ADDR and MASTER_PORT.

    Raises:
        ClusterError: DeepSpeed sees another world than the launcher built.
        RankUnreachableError: The ranks did not find each other in time.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    backend = "nccl" if device.type == "cuda" else "gloo"
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    if not dist.is_initialized():
        if store is not None:
            store.set(_arrival_key(world.rank), socket.gethostname())
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=world.rank,
                world_size=world.world_size,
                timeout=timedelta(seconds=meet_timeout_s or timeout_s),
                **options,
            )
        except RuntimeError as error:  # torch's network errors are among them.
            raise RankUnreachableError(
                problem=f"Rank {world.rank} on {socket.gethostname()} did not find the other "
                f"{world.world_size - 1} ranks over "
                f"{os.environ.get('GLOO_SOCKET_IFNAME') or 'the default interface'}: "
                f"{_who_is_missing(store, world)}{str(error).strip().splitlines()[0]}",
                way_out="Check the network between the nodes with `raydist doctor`, or set "
                "network.interface.",
            ) from error
        hold_time_limits(timeout_s)
    if not with_deepspeed:
        return
    import deepspeed

    said = io.StringIO()
    # It prints that an op was built, on every start.
    with _hidden("LOCAL_SIZE"), contextlib.redirect_stdout(said):
        deepspeed.init_distributed(
            dist_backend=backend,
            auto_mpi_discovery=False,
            verbose=False,
            timeout=timedelta(seconds=timeout_s),
            rank=world.rank,
            world_size=world.world_size,
        )
    logger.debug("deepspeed: %s", said.getvalue().strip())
    seen = deepspeed.comm.get_world_size()
    if seen != world.world_size:
        raise ClusterError(
            problem=f"DeepSpeed sees {seen} ranks; the launcher built {world.world_size}.",
            way_out="Remove MPI or launcher variables from the workers' environment.",
        )


def _arrival_key(rank: int) -> str:
    return f"raydist/arrived/{rank}"


def _who_is_missing(store: Any, world: World) -> str:
    """Name the ranks that have not come to the store, as far as it still answers."""
    if store is None:
        return ""
    try:
        missing = [r for r in range(world.world_size) if not store.check([_arrival_key(r)])]
    except RuntimeError:
        return "rank 0's store does not answer; "
    return f"ranks {missing} did not come; " if missing else "all came to the store; "


@contextlib.contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Hide an environment variable for as long as this lasts.

    Where LOCAL_SIZE says that one node has all ranks, DeepSpeed takes 66 MiB of /dev/shm for
    each, for an all-reduce that only inference uses, and leaves it there for good.
    """
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value


class TorchGroup:
    """Ranks agreeing over gloo, beside whatever moves the tensors."""

    def __init__(self, timeout_s: float) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._group: Any = None
        if dist.get_backend() != "gloo":
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's value in rank order on rank 0, None elsewhere."""
        out: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, out, dst=0, group=self._group)
        return out

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]
