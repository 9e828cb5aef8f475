# SPDX-License-Identifier: Apache-2.0
"""Bars of the main job, each against a named rival, paired in one run on a quiet machine.

    python tests/bench/main_job.py [steps] [start] [memory] [--pairs 5]

steps:  time of a step with per-step metrics on, against bare torchrun + DeepSpeed.
start:  command to first optimizer step on a fresh cluster, against plain TorchTrainer.
memory: resident memory of a worker in training, against plain TorchTrainer's.

Rivals: tests/bench/rivals/llama_plain.py. Pairs run ABBA; medians are of the pairs' ratios.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from raydist.config.deepspeed import render
from raydist.data import find_source, map_in_process, prepare, sample_indices
from raydist.metrics.history import read_history
from raydist.storage import open_store
from raydist.world import plan_batch

ROOT = Path(__file__).parents[2]
JOB = ROOT / "jobs/llama_zero3.py"
RIVAL = ROOT / "tests/bench/rivals/llama_plain.py"
WARM_UP_STEPS = 10
sys.path.insert(0, str(JOB.parent))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run of one side."""

    step_s: float
    start_s: float
    worker_mib: float
    loss: float


class Bench:
    """Both sides over one prepared corpus and one order of samples."""

    def __init__(self, folder: Path) -> None:
        from llama_zero3 import llama_tiny

        self.folder = folder
        config = llama_tiny()
        batch = plan_batch(global_batch_size=16, micro_batch_size=8, world_size=2)
        source = find_source(config.data.source, storage=str(folder))
        manifest = prepare(source, map_in_process)
        store = open_store(source.url)
        tokens = folder / "tokens.bin"
        tokens.write_bytes(b"".join(store.get(part.key) for part in manifest.parts))
        num_samples = manifest.num_tokens // config.data.sequence_length
        order = sample_indices(np.arange(10_000), num_samples=num_samples, seed=config.seed)
        np.save(folder / "order.npy", order)
        self._settings = {
            "tokens": str(tokens),
            "order": str(folder / "order.npy"),
            "ds_config": render(config, batch),
        }
        self._count = 0

    def rival(self, *, steps: int, launcher: list[str]) -> Measured:
        """Run the plain script to ``steps``."""
        self._count += 1
        out = self.folder / f"rival-{self._count}.json"
        settings = self.folder / f"rival-{self._count}.settings.json"
        settings.write_text(json.dumps({**self._settings, "steps": steps, "out": str(out)}))
        begun, mib = self._run([*launcher, str(RIVAL), str(settings)])
        return self._measured(json.loads(out.read_text()), begun, mib)

    def ours(self, *, steps: int, launcher: list[str]) -> Measured:
        """Run the default job to ``steps``."""
        self._count += 1
        name = f"ours-{self._count}"
        begun, mib = self._run(
            [
                *launcher, str(JOB), "--name", name, "--storage", str(self.folder),
                "--num-steps", str(steps), "--optimizer.warmup-steps", "0",
                "--metrics.sample-tokens", "0", "--optimizer.schedule", "constant",
                "--checkpoint.every-steps", "1000000",
            ]
        )  # fmt: skip
        rows = read_history(open_store(str(self.folder / name))).rows
        if len(rows) != steps:
            raise SystemExit(f"{len(rows)} metrics rows for {steps} steps")
        return self._measured(rows, begun, mib)

    def _measured(self, rows: list[dict], begun: float, mib: float) -> Measured:
        times = [row["step_time_s"] for row in rows[WARM_UP_STEPS:]] or [float("nan")]
        return Measured(
            step_s=statistics.median(times),
            start_s=rows[0]["unix_s"] - begun,
            worker_mib=mib,
            loss=statistics.fmean(row["loss"] for row in rows[-10:]),
        )

    def _run(self, command: list[str]) -> tuple[float, float]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        environment |= {
            "RAY_AUTH_MODE": "token",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        log = self.folder / f"log-{self._count}.txt"
        begun = time.time()
        with log.open("w") as out:
            process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT
            )
            peak: list[float] = [0.0]
            watcher = threading.Thread(target=_watch_workers, args=(process.pid, peak))
            watcher.start()
            status = process.wait()
            watcher.join()
        if status:
            raise SystemExit(f"{' '.join(command)} ended with {status}:\n{log.read_text()[-3000:]}")
        return begun, peak[0]


def _watch_workers(pid: int, peak: list[float]) -> None:
    """Keep the largest resident memory of a Ray Train worker below ``pid``."""
    while psutil.pid_exists(pid):
        try:
            for child in psutil.Process(pid).children(recursive=True):
                if "RayTrainWorker" in "".join(child.cmdline()[:1]):
                    peak[0] = max(peak[0], child.memory_info().rss / 2**20)
        except psutil.NoSuchProcess:
            continue
        time.sleep(0.5)


def _pairs(bench: Bench, count: int, steps: int, rival: list[str], ours: list[str]):
    """Run pairs in the order A B B A and return them."""
    found = []
    for number in range(count):
        sides = [
            lambda: bench.rival(steps=steps, launcher=rival),
            lambda: bench.ours(steps=steps, launcher=ours),
        ]
        if number % 2:
            sides.reverse()
        results = [side() for side in sides]
        if number % 2:
            results.reverse()
        found.append(results)
        print("  pair", number + 1, *results, flush=True)
    return found


def _report(name: str, unit: str, pairs: list, field: str) -> None:
    ratios = [getattr(b, field) / getattr(a, field) for a, b in pairs]
    rival = statistics.median(getattr(a, field) for a, _ in pairs)
    ours = statistics.median(getattr(b, field) for _, b in pairs)
    print(
        f"{name}: rival {rival:.3f} {unit}, raydist {ours:.3f} {unit}, ratio "
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
        f"{len(pairs)} pairs, load {os.getloadavg()[0]:.2f}",
        flush=True,
    )


def main() -> None:
    arguments = sys.argv[1:]
    count = 5
    if "--pairs" in arguments:
        at = arguments.index("--pairs")
        count = int(arguments[at + 1])
        del arguments[at : at + 2]
    what = arguments or ["steps", "start", "memory"]
    python = [sys.executable]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory(prefix="raydist-bench-") as folder:
        bench = Bench(Path(folder))
        bench.ours(steps=2, launcher=python)  # warm caches for both
        if "steps" in what:
            pairs = _pairs(bench, count, 80, torchrun, python)
            _report("C1 step, Ray", "s", pairs, "step_s")
            _report("C1 loss of the last ten steps", "nats", pairs, "loss")
        if "start" in what or "memory" in what:
            pairs = _pairs(bench, count, 12, python, python)
            _report("C2 command to first step", "s", pairs, "start_s")
            _report("C14 worker memory", "MiB", pairs, "worker_mib")


if __name__ == "__main__":
    main()
