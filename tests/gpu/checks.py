# SPDX-License-Identifier: Apache-2.0
"""The checks behind tests/gpu/run: runs of the default job under torchrun, on the GPUs there are.

Without a GPU the small checks still run, on one CPU rank; the large model is then left out.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from raydist.config import ModelConfig
from raydist.metrics.flops import flops_per_token, mfu, peak_flops_per_s
from raydist.metrics.history import merge, read_history
from raydist.storage import open_store

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--num-steps", "12", "--checkpoint.every-steps", "6", "--metrics.sample-tokens", "0",
         "--optimizer.warmup-steps", "2", "--optimizer.decay-steps", "12"]  # fmt: skip
HALF_BILLION = ModelConfig(
    vocab_size=32_000, hidden_size=1536, intermediate_size=4096, num_layers=16,
    num_attention_heads=16, num_key_value_heads=8,
)  # fmt: skip


def run(folder: Path, name: str, *arguments: str) -> list[dict]:
    """Run the job to its end and return its rows."""
    ranks = max(1, torch.cuda.device_count())
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={ranks}", "jobs/llama_zero3.py", "--name", name,
            "--storage", str(folder), *arguments,
        ],
        cwd=ROOT, env=environment, check=True, timeout=300,
    )  # fmt: skip
    return merge(read_history(open_store(str(folder / name))).rows).rows


def losses(rows: list[dict]) -> list[float]:
    return [row["loss"] for row in rows]


def large(folder: Path, device: str) -> dict[str, object]:
    """Train the half-billion model and return its figures."""
    model = HALF_BILLION
    rows = run(
        folder, "half-billion", "--num-steps", "40", "--checkpoint.every-steps", "20",
        "--metrics.sample-tokens", "0", "--model.vocab-size", str(model.vocab_size),
        "--model.hidden-size", str(model.hidden_size),
        "--model.intermediate-size", str(model.intermediate_size),
        "--model.num-layers", str(model.num_layers),
        "--model.num-attention-heads", str(model.num_attention_heads),
        "--model.num-key-value-heads", str(model.num_key_value_heads),
        "--data.sequence-length", "2048", "--batch.global-batch-size", "8",
        "--batch.micro-batch-size", "8", "--optimizer.learning-rate", "3e-4",
    )  # fmt: skip
    step_s = statistics.median(row["step_time_s"] for row in rows[10:])
    tokens_per_s = 8 * 2048 / step_s
    found: dict[str, object] = {"0.5B step, s": step_s, "0.5B tokens/s": tokens_per_s}
    found["0.5B MFU"] = mfu(
        tokens_per_s, flops_per_token(model, sequence_length=2048), peak_flops_per_s(device),
        torch.cuda.device_count(),
    )  # fmt: skip
    found["0.5B save, s"] = max(row["save_s"] for row in rows)
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found: dict[str, object] = {"device": device, "torch": torch.__version__}

    zero3 = losses(run(folder, "zero3", *SMALL, "--precision", "fp32"))
    ddp = losses(run(folder, "ddp", *SMALL, "--precision", "fp32", "--strategy", "ddp"))
    found["zero3 against ddp, largest relative difference"] = max(
        abs(a - b) / b for a, b in zip(zero3, ddp, strict=True)
    )

    whole = losses(run(folder, "whole", *SMALL))
    half = [SMALL[0], "6", *SMALL[2:]]
    run(folder, "half", *half)
    resumed = losses(run(folder, "half", *SMALL))
    found["resumed run is bit-equal"] = resumed == whole

    if torch.cuda.is_available():
        found |= large(folder, device)
    print(json.dumps(found, indent=1))
    if (
        not found["resumed run is bit-equal"]
        or found["zero3 against ddp, largest relative difference"] > 1e-4
    ):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
