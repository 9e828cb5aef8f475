# SPDX-License-Identifier: Apache-2.0
"""How ranks agree: the few collectives that saving and restoring need, on plain data."""

from __future__ import annotations

from typing import Any, Protocol


class Group(Protocol):
    """All ranks of the run. Every rank calls every method, in the same order.

    Values are of JSON types, bytes or arrays of numbers; they never hold tensors or store clients.
    """

    @property
    def rank(self) -> int:
        """This rank's index."""
        ...

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        ...

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's value in rank order on rank 0, None elsewhere.

        Where the group has a time limit that leaves ranks behind, theirs are None.
        """
        ...

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        ...
