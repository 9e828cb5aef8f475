# SPDX-License-Identifier: Apache-2.0
"""--dry-run of every recipe: in a process of its own, without GPU, network, weights or torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RECIPES = ("llama_tiny", "llama3_8b", "llama3_70b", "qwen2_72b")
PROBE = """
import sys
sys.argv = ["llama_zero3.py", *sys.argv[1:]]
sys.path.insert(0, "jobs")
import llama_zero3
status = llama_zero3.main(llama_zero3.JOB)
heavy = {"torch", "deepspeed", "ray", "transformers"} & sys.modules.keys()
print("heavy", sorted(heavy))
raise SystemExit(status)
"""


def dry_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROBE, *arguments, "--dry-run"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_dry_run_of_a_recipe_prints_the_plan_and_loads_nothing_heavy(
    recipe: str, tmp_path: Path
) -> None:
    done = dry_run(recipe, "--storage", str(tmp_path / "runs"))
    assert done.returncode == 0, done.stderr
    for part in ("global_batch_size", "placement:", "batch:", "network:", "Memory per rank"):
        assert part in done.stdout
    assert "heavy []" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_recipe_for_gpus_fits_the_hardware_that_it_names(recipe: str) -> None:
    assert "Fits on H100-80G" in dry_run(recipe).stdout


def test_qwen2_72b_would_not_fit_without_the_offload_that_its_recipe_has() -> None:
    done = dry_run("qwen2_72b", "--zero.offload-optimizer", "none")
    assert "Does not fit" in done.stdout


def test_dry_run_of_a_batch_that_does_not_divide_is_refused() -> None:
    done = dry_run("llama3_8b", "--batch.global-batch-size", "100")
    assert done.returncode == 2
    assert "96 or 104" in done.stderr
