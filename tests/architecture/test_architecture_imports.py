# SPDX-License-Identifier: Apache-2.0
"""What may import what, and what stays light. Real: import-linter and fresh interpreters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_HEAVY = {"torch", "deepspeed", "ray", "transformers"}


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], cwd=_ROOT, capture_output=True, text=True, check=False
    )


def test_import_contracts_are_kept() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    found = _run(linter, "--no-cache", "--no-logo")
    assert found.returncode == 0, found.stdout + found.stderr


def _imported(*arguments: str) -> set[str]:
    """Top-level modules that an interpreter with ``arguments`` imports; it must exit with 0."""
    found = _run(sys.executable, "-X", "importtime", *arguments)
    assert found.returncode == 0, found.stderr[-2000:]
    lines = [line for line in found.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.mark.parametrize(
    "module",
    [
        "raydist",
        "raydist.config.cli",
        "raydist.plan",
        "raydist.metrics",
        "raydist.network",
        "raydist.doctor",
        "raydist.storage",
        "raydist.train.job",
        "raydist.train.task",
        "raydist.launch",
        "raydist.launch.placement",
        "raydist.launch.preflight",
    ],
)
def test_import_of_module_loads_nothing_heavy(module: str) -> None:
    assert not _imported("-c", f"import {module}") & _HEAVY


def test_import_of_raydist_loads_nothing_but_the_standard_library() -> None:
    third_party = _imported("-c", "import raydist") - set(sys.stdlib_module_names)
    before = _imported("-c", "pass") - set(sys.stdlib_module_names)
    assert third_party - before == {"raydist"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("-m", "raydist.cli.main", "--help"),
        ("-m", "raydist.cli.main", "--version"),
        ("-m", "raydist.cli.main", "cluster", "local", "--help"),
        ("-m", "raydist.cli.main", "doctor", "--help"),
        ("jobs/llama_zero3.py", "--help"),
        ("jobs/llama_zero3.py", "llama3_8b", "--help"),
    ],
    ids=" ".join,
)
def test_help_loads_nothing_heavy(arguments: tuple[str, ...]) -> None:
    assert not _imported(*arguments) & _HEAVY
