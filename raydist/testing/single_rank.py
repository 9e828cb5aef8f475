# SPDX-License-Identifier: Apache-2.0
"""The group of a world of one."""

from __future__ import annotations

from typing import Any


class SingleRank:
    """The group of a world of one."""

    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any] | None:
        """Return the one value."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Return the value."""
        return value
