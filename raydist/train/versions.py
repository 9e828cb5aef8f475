# SPDX-License-Identifier: Apache-2.0
"""Versions that a run's numbers depend on."""

from __future__ import annotations

import importlib.metadata


def versions() -> dict[str, str]:
    """Return the versions of what a run's numbers depend on."""
    found = {}
    for name in ("raydist", "torch", "deepspeed", "ray", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
