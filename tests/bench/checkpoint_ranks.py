# SPDX-License-Identifier: Apache-2.0
"""What each rank of tests/bench/checkpoint.py does; started by torchrun, two ranks over gloo.

    torchrun --nproc-per-node 2 checkpoint_ranks.py SETTINGS.json

The state is a real ZeRO-3 engine's. Figures are the longest over the ranks, in SETTINGS["out"].
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raydist.train.environment import quiet_libraries, select_accelerator

select_accelerator()
quiet_libraries()

import psutil  # noqa: E402
import pyarrow.fs  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType  # noqa: E402

from raydist.checkpoint.attempt import open_attempt  # noqa: E402
from raydist.checkpoint.background import BackgroundSaver  # noqa: E402
from raydist.checkpoint.manifest import Progress  # noqa: E402
from raydist.checkpoint.saver import RunIdentity, Saver  # noqa: E402
from raydist.checkpoint.snapshot import Allocate, touched_memory  # noqa: E402
from raydist.clock import SystemClock  # noqa: E402
from raydist.storage import ObjectStore, open_store  # noqa: E402
from raydist.testing.configs import small_config  # noqa: E402
from raydist.testing.memory_store import MemoryStore  # noqa: E402
from raydist.train import rng  # noqa: E402
from raydist.train.job import Job  # noqa: E402
from raydist.train.rendezvous import (  # noqa: E402
    TorchGroup,
    choose_device,
    join,
    world_from_environment,
)
from raydist.train.store_group import StoreGroup  # noqa: E402
from raydist.world import plan_batch  # noqa: E402

LAYERS, LENGTH = 6, 8


class Net(torch.nn.Module):
    """Linear layers of ``width`` squared elements: state is 12 bytes of each, over the ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return hidden


class NullStore(MemoryStore):
    """Keeps small objects, and of data objects their size only."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        super().put(key, b"" if key.endswith(".safetensors") else data, if_absent=if_absent)


_UPLOADER = """
import json, mmap, sys
from raydist.storage import open_store
store = open_store(sys.argv[2])
with open(sys.argv[1], "r+b") as file:
    view = memoryview(mmap.mmap(file.fileno(), 0))
for line in sys.stdin:
    key, size = json.loads(line)
    store.put(key, view[:size])
    print("done", flush=True)
"""


class ProcessStore:
    """Uploads data objects from a process of its own, out of shared memory: no shared GIL."""

    def __init__(self, url: str, path: Path) -> None:
        inner = open_store(url)
        self.get, self.size, self.list, self.delete = (
            inner.get, inner.size, inner.list, inner.delete,
        )  # fmt: skip
        self._inner, self._url, self._path = inner, url, path
        self._uploader: subprocess.Popen[str] | None = None

    def allocate(self, num_bytes: int) -> memoryview:
        with self._path.open("w+b") as file:
            file.truncate(num_bytes)
            memory = mmap.mmap(file.fileno(), num_bytes)
        memoryview(memory)[:] = bytes(num_bytes)
        self._uploader = subprocess.Popen(
            [sys.executable, "-c", _UPLOADER, str(self._path), self._url],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        return memoryview(memory)

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        if not key.endswith(".safetensors"):
            self._inner.put(key, data, if_absent=if_absent)
            return
        uploader = self._uploader
        if uploader is None or uploader.stdin is None or uploader.stdout is None:
            raise SystemExit("no uploader")
        uploader.stdin.write(json.dumps([key, len(data)]) + "\n")
        uploader.stdin.flush()
        if uploader.stdout.readline() != "done\n":
            raise SystemExit("the uploader failed")

    def close(self) -> None:
        if self._uploader is not None and self._uploader.stdin is not None:
            self._uploader.stdin.close()
            self._uploader.wait()
        self._path.unlink()


class Rank:
    """One rank with its engine and its ways to save."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.world = world_from_environment(os.environ)
        os.environ["LOCAL_SIZE"] = str(self.world.local_world_size)
        torch.set_num_threads(1)
        device = choose_device(self.world)
        join(self.world, device=device, store=None, timeout_s=300, with_deepspeed=True)
        self.group = TorchGroup(300)
        self.rank, self.size = self.world.rank, self.world.world_size
        state_bytes = settings["mib"] * 2**20 * self.size
        self.width = int((state_bytes / 12 / LAYERS) ** 0.5) // 8 * 8
        batch = {"batch.micro_batch_size": 4, "batch.global_batch_size": 4 * self.size}
        config = small_config(precision="fp32", **batch)
        job = Job(
            recipes=[lambda: config],
            build_model=lambda _: Net(self.width),
            loss_fn=lambda model, batch: model(batch["tokens"]).square().mean(),
        )
        from raydist.train.zero import ZeroEngine

        self.engine = ZeroEngine(
            job, config,
            plan_batch(
                global_batch_size=4 * self.size, micro_batch_size=4, world_size=self.size
            ), device,
        )  # fmt: skip
        self.batch = {"tokens": torch.randn(4 * LENGTH, self.width)}
        self.step()
        self.held = self.engine._held()
        self.bytes = sum(h.wanted.nbytes for h in self.held)
        self.folder = Path(settings["folder"])
        self._count = 0
        gc.collect()
        gc.freeze()

    def step(self) -> float:
        begun = time.perf_counter()
        self.engine.step([self.batch], learning_rate=1e-6)
        return time.perf_counter() - begun

    def timed(self, work: Callable[[], Any]) -> float:
        """Seconds of ``work`` on the slowest rank, all beginning together."""
        dist.barrier()
        begun = time.perf_counter()
        work()
        took = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return float(took)

    def background(
        self, store: ObjectStore, allocate: Allocate = touched_memory
    ) -> BackgroundSaver:
        self._count += 1
        attempt = None
        if self.rank == 0:
            attempt = open_attempt(run="bench", store=store, driver="b", clock=SystemClock())
        number = self.group.broadcast(attempt.number if attempt else None)
        saver = Saver(
            store=store,
            group=StoreGroup(
                f"bench-{self._count}", timeout_s=300, rank=self.rank, world_size=self.size
            ),
            attempt_number=number,
            attempt=attempt,
            identity=RunIdentity(
                run="bench", strategy="zero3", precision="fp32", config_hash="", corpus="",
                versions={},
            ),
            max_abandoned=1,
        )  # fmt: skip
        return BackgroundSaver(
            saver=saver,
            group=self.group,
            ranges=self.engine.wanted() + rng.held(rank=self.rank, world_size=self.size),
            committed=lambda step, key: None,
            allocate=allocate,
        )

    def export(self, buffers: dict[str, memoryview]) -> dict[str, float]:
        rng.export(buffers, rank=self.rank, world_size=self.size)
        return self.engine.export(buffers)

    def save(self, background: BackgroundSaver, step: int) -> None:
        if background.agree(lambda is_busy: is_busy):
            raise SystemExit("a save began before the last was over")
        progress = Progress(step=step, data_position=0, epoch=0, tokens=0, skipped_steps=0)
        background.save(self.export, progress=progress)

    def settle(self, background: BackgroundSaver) -> None:
        background.wait()
        while background.agree(lambda is_busy: is_busy):
            background.wait()


def _stager(*, shared: bool) -> DefaultStager:
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=shared, use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )  # fmt: skip


class Sides:
    """Each way to save: a stall that is timed, and what has to end before the next one."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.store = open_store(rank.settings["storage"])
        self.ours = rank.background(self.store)
        self.targets = [torch.zeros_like(h.tensor) for h in rank.held]
        tensors = {f"{h.spec.key}/rank{rank.rank}": h.tensor for h in rank.held}
        self.state = {"state": tensors}
        # Its other stager (BlockingAsyncStager) asks for pinned memory, so for a GPU.
        thread, process = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
        self.stagers = {
            "dcp thread": (_stager(shared=False), thread),
            "dcp thread, shared memory": (_stager(shared=True), thread),
            "dcp process, shared memory": (_stager(shared=True), process),
        }
        # A group of its own: in thread mode its collectives would meet ours, and hang.
        self.dcp_group = dist.new_group(backend="gloo")
        self.number = 0
        self.ours.wait()

    def names(self) -> list[str]:
        return ["memcpy", "raydist", *self.stagers, "save_checkpoint + pyarrow"]

    def run(self, name: str) -> float:
        self.number += 1
        if name == "memcpy":
            return self.rank.timed(self._memcpy)
        if name == "raydist":
            took = self.rank.timed(lambda: self.rank.save(self.ours, self.number))
            self.rank.settle(self.ours)
            return took
        if name in self.stagers:
            return self._dcp(name)
        return self._plain()

    def _memcpy(self) -> None:
        for target, held in zip(self.targets, self.rank.held, strict=True):
            target.copy_(held.tensor)

    def _dcp(self, name: str) -> float:
        stager, kind = self.stagers[name]
        folder = self.rank.folder / f"dcp-{self.number}"
        replies: list[Any] = []

        def save() -> None:
            replies.append(
                dcp.async_save(
                    self.state, checkpoint_id=str(folder), async_checkpointer_type=kind,
                    async_stager=stager, process_group=self.dcp_group,
                )
            )  # fmt: skip

        took = self.rank.timed(save)
        reply = replies[0]
        (reply if hasattr(reply, "result") else reply.upload_completion).result()
        dist.barrier()
        if self.rank.rank == 0:
            written = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
            if written < self.rank.bytes * self.rank.size:
                raise SystemExit(f"{name} wrote {written} bytes")
            shutil.rmtree(folder)
        return took

    def _plain(self) -> float:
        tag = f"step-{self.number}"
        folder = self.rank.folder / "engine"

        def save() -> None:
            self.rank.engine.model.save_checkpoint(str(folder), tag=tag)
            dist.barrier()
            if self.rank.rank == 0:  # as a Ray Train worker reports a directory
                bucket = self.rank.settings["bucket"]
                s3 = pyarrow.fs.S3FileSystem(
                    endpoint_override=os.environ["AWS_ENDPOINT_URL_S3"], region="us-east-1"
                )
                pyarrow.fs.copy_files(
                    str(folder / tag), f"{bucket}/plain/{tag}", destination_filesystem=s3
                )

        took = self.rank.timed(save)
        if self.rank.rank == 0:
            shutil.rmtree(folder)
        return took


def stall(rank: Rank) -> dict[str, Any]:
    sides = Sides(rank)
    first = sides.run("raydist")
    for name in sides.names():
        sides.run(name)  # warm: buffers made, processes started
    found: dict[str, list[float]] = {name: [] for name in sides.names()}
    for number in range(rank.settings["rounds"]):
        names = sides.names()
        for name in names if number % 2 == 0 else names[::-1]:
            found[name].append(sides.run(name))
    return {"first": first, "stall_s": found, "bytes_per_rank": rank.bytes}


def copies(rank: Rank) -> dict[str, Any]:
    """The copy itself with one thread and with two, on one rank at a time and on both."""
    targets = [torch.zeros_like(h.tensor) for h in rank.held]
    found: dict[str, list[float]] = {}
    for number in range(2 * rank.settings["rounds"]):
        for threads in (1, 2) if number % 2 else (2, 1):
            torch.set_num_threads(threads)

            def copy() -> None:
                for target, held in zip(targets, rank.held, strict=True):
                    target.copy_(held.tensor)

            found.setdefault(f"{threads} threads", []).append(rank.timed(copy))
    torch.set_num_threads(1)
    return found


def _cpu_s() -> float:
    """CPU seconds of this process and those that it started."""
    own = psutil.Process()
    times = [p.cpu_times() for p in [own, *own.children(recursive=True)]]
    return sum(t.user + t.system for t in times)


def interference(rank: Rank) -> dict[str, Any]:
    """Steps while a save is being written all the time, against steps without; ABBA."""
    url = rank.settings["storage"]
    apart = ProcessStore(f"{url}-process", Path(f"/dev/shm/raydist-bench-{os.getpid()}"))
    ways: dict[str, tuple[ObjectStore, Allocate]] = {
        "null store, thread": (NullStore(), touched_memory),
        "S3, thread": (open_store(f"{url}-thread"), touched_memory),
        "S3, process": (apart, apart.allocate),
    }
    found: dict[str, Any] = {}
    for name, (store, allocate) in ways.items():
        background = rank.background(store, allocate)
        rank.settle(background)
        # What a save costs beside nothing: every thread of it, the server's not.
        before = _cpu_s()
        rank.save(background, 1)
        rank.settle(background)
        cpu_s = _cpu_s() - before
        steps: dict[str, list[float]] = {"idle": [], "persisting": []}
        persisted: list[float] = []
        saves = 1
        for phase in range(rank.settings["phases"]):
            is_saving = phase % 4 in (1, 2)
            for _ in range(rank.settings["steps"]):
                if is_saving and not background.agree(lambda is_busy: is_busy):
                    saves += 1
                    rank.save(background, saves)
                took = rank.timed(rank.step)
                steps["persisting" if is_saving else "idle"].append(took)
            rank.settle(background)
            persisted += [f.persist_s for f in background.take_finished()]
        found[name] = {
            "cpu_s_per_gib": cpu_s / (rank.bytes / 2**30), "steps_s": steps,
            "persist_s": statistics.median(persisted), "saves": saves,
        }  # fmt: skip
    apart.close()
    return found


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    rank = Rank(settings)
    parts = {"stall": stall, "copies": copies, "interference": interference}
    found = {name: parts[name](rank) for name in settings["parts"]}
    if rank.rank == 0:
        Path(settings["out"]).write_text(json.dumps(found))
    rank.group.broadcast(None)
    os._exit(0)  # gloo threads may abort the interpreter while it ends


if __name__ == "__main__":
    main()
