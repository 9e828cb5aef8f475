# SPDX-License-Identifier: Apache-2.0
"""What a save costs the training (C3), and what the training feels of it (C4).

    python tests/bench/checkpoint.py [stall] [copies] [interference] [--mib 256] [--rounds 5]

stall:        how long training stands still for a save of a real ZeRO-3 engine on two ranks,
              against a memcpy of the same bytes, torch DCP's asynchronous modes, and
              engine.save_checkpoint with pyarrow's copy of the directory to the same S3.
copies:       the copy with one thread a rank, and with two.
interference: steps while a save is being written, against steps without.

Sides take turns in one run, in the order A B ... B A; a figure is the longest over the ranks.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from raydist.testing.s3_server import S3Server

RANKS = Path(__file__).with_name("checkpoint_ranks.py")


def _spread(values: list[float], unit: float = 1e3) -> str:
    low, high = min(values) * unit, max(values) * unit
    return f"{statistics.median(values) * unit:.1f} ({low:.1f} to {high:.1f})"


def _ratios(values: list[float], rivals: list[float]) -> str:
    ratios = [a / b for a, b in zip(values, rivals, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _show_stall(found: dict[str, Any]) -> None:
    mib = found["bytes_per_rank"] / 2**20
    stalls = found["stall_s"]
    print(f"C3 stall of a save, {mib:.0f} MiB a rank, ms; raydist's over each rival, paired")
    for name, values in stalls.items():
        print(f"  {name:<28}{_spread(values):>32}   {_ratios(stalls['raydist'], values)}")
    best = [min(v) for v in zip(*(stalls[n] for n in stalls if "dcp" in n), strict=True)]
    print(f"  over the best DCP mode of each round: {_ratios(stalls['raydist'], best)}")
    later = statistics.median(stalls["raydist"])
    first = found["first"]
    print(f"  first save {first * 1e3:.1f} ms, {first / later:.2f} of a later one")


def _show_interference(found: dict[str, Any]) -> None:
    print("C4 steps while a save is being written, ms")
    for name, one in found.items():
        idle, busy = one["steps_s"]["idle"], one["steps_s"]["persisting"]
        ratio = statistics.median(busy) / statistics.median(idle)
        print(
            f"  {name:<18} idle {_spread(idle)}, persisting {_spread(busy)}, ratio of medians "
            f"{ratio:.2f}; {one['saves']} saves, {one['persist_s']:.2f} s each behind the steps, "
            f"{one['cpu_s_per_gib']:.2f} CPU-s/GiB"
        )


def main() -> None:
    arguments = sys.argv[1:]
    numbers = {"--mib": 256, "--rounds": 5, "--phases": 8, "--steps": 6}
    for name in numbers:
        if name in arguments:
            at = arguments.index(name)
            numbers[name] = int(arguments[at + 1])
            del arguments[at : at + 2]
    parts = arguments or ["stall", "copies", "interference"]
    with tempfile.TemporaryDirectory(prefix="raydist-bench-") as folder, S3Server() as server:
        out = Path(folder, "out.json")
        settings = {
            "parts": parts, "out": str(out), "folder": folder, "bucket": server.bucket,
            "storage": f"s3://{server.bucket}/bench",
            **{name.removeprefix("--"): value for name, value in numbers.items()},
        }  # fmt: skip
        Path(folder, "settings.json").write_text(json.dumps(settings))
        environment = {
            **os.environ, **server.environment(), "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip
        subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node=2", str(RANKS), str(Path(folder, "settings.json")),
            ],
            env=environment, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        found = json.loads(out.read_text())
    if "stall" in found:
        _show_stall(found["stall"])
    if "copies" in found:
        one, two = found["copies"]["1 threads"], found["copies"]["2 threads"]
        print(f"copy, ms: 1 thread a rank {_spread(one)}, 2 threads {_spread(two)}")
    if "interference" in found:
        _show_interference(found["interference"])
    print(f"load {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
