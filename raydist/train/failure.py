# SPDX-License-Identifier: Apache-2.0
"""An exception of the job's own code, as something that can be told apart from a lost peer."""

from __future__ import annotations

import traceback

from raydist.errors import RankFailedError

_COLLECTIVE_MODULES = (
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch.autograd.graph",  # gradients are reduced from inside the backward
    "deepspeed.comm",
    "deepspeed.runtime.zero",
    "deepspeed.utils.nvtx",
)


def rank_failure(error: Exception, *, rank: int, step: int | None) -> RankFailedError:
    """Return the error that a rank reports for ``error``, raised in ``step``."""
    return RankFailedError(
        rank=rank,
        error=type(error).__name__,
        step=step,
        is_collateral=came_out_of_a_collective(error),
        text="".join(traceback.format_exception(error)).rstrip(),
    )


def came_out_of_a_collective(error: BaseException) -> bool:
    """Whether an exception was raised where ranks wait for each other.

    Judged by the module of the innermost frame, never by the text.
    """
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return False
    module = ""
    frame = error.__traceback__
    while frame is not None:
        module = frame.tb_frame.f_globals.get("__name__", "")
        frame = frame.tb_next
    return module.startswith(_COLLECTIVE_MODULES)
