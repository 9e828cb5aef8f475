# SPDX-License-Identifier: Apache-2.0
"""raydist: distributed training on Ray, on machines that come and go."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raydist.config import RunConfig
    from raydist.errors import RaydistError
    from raydist.launch import launch, main
    from raydist.train.job import Job

__version__ = "0.1.0"
__all__ = ["Job", "RaydistError", "RunConfig", "launch", "main"]

_HOMES = {
    "Job": "raydist.train.job",
    "RaydistError": "raydist.errors",
    "RunConfig": "raydist.config",
    "launch": "raydist.launch",
    "main": "raydist.launch",
}


def __getattr__(name: str) -> Any:
    """Resolve public names on first use, so that `import raydist` stays light (PEP 562).

    Raises:
        AttributeError: No public name.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
