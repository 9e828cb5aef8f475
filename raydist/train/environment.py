# SPDX-License-Identifier: Apache-2.0
"""What must be set in a rank's process before its libraries are imported or used."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path


def select_accelerator() -> None:
    """Tell DeepSpeed the accelerator before it is imported; what the site set is kept."""
    if "DS_ACCELERATOR" not in os.environ and not Path("/proc/driver/nvidia/version").exists():
        os.environ["DS_ACCELERATOR"] = "cpu"


def set_num_threads() -> int:
    """Give torch the threads this rank has CPUs for, and return how many.

    OMP_NUM_THREADS is what the launcher derived from the rank's CPUs, or what the site set.
    """
    import torch

    threads = int(os.environ.get("OMP_NUM_THREADS") or 1)
    torch.set_num_threads(threads)
    return threads


def quiet_libraries() -> None:
    """Leave out what libraries say on every start and a user can do nothing about."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed.*")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
