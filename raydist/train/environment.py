# SPDX-License-Identifier: Apache-2.0
"""What must be set in a rank's process before its libraries are imported or used."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path


def select_accelerator() -> None:
    """Tell DeepSpeed the accelerator before it is imported; what the site set is kept.

    Its ops are built with the ninja of this environment and kept beside it, whatever started the
    process: another ninja, or another environment's build in a shared cache, makes a built op
    look stale, and then it is compiled for a minute at every start.
    """
    tools = str(Path(sys.executable).parent)
    if os.environ.get("PATH", "").split(os.pathsep)[0] != tools:
        os.environ["PATH"] = f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"
    if os.access(sys.prefix, os.W_OK):
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{sys.prefix}/torch_extensions")
    # Asking CUDA itself would fix its list of devices, which Ray widens later to those of all
    # ranks on the node.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if "DS_ACCELERATOR" not in os.environ:
        os.environ["DS_ACCELERATOR"] = "cuda" if _has_cuda() else "cpu"


def _has_cuda() -> bool:
    import torch

    has_driver = Path("/proc/driver/nvidia/version").exists()
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return has_driver and not is_hidden and torch.version.cuda is not None


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


def build_ops() -> None:
    """Compile DeepSpeed's CPU communication op now rather than at a job's first start."""
    select_accelerator()
    quiet_libraries()
    import deepspeed  # noqa: F401
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    ShareMemCommBuilder().load(verbose=False)


if __name__ == "__main__":
    build_ops()
