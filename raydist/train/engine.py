# SPDX-License-Identifier: Apache-2.0
"""The Engine protocol: one optimizer step, and state in and out as 1-D ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from raydist.checkpoint.ranges import WantedRange
from raydist.train.job import Batch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one optimizer step did, the same on every rank.

    Fields:
        loss: Mean over the global batch.
        grad_norm: Global gradient norm before clipping; inf or nan when non-finite.
        skipped: Whether the update was left out because a gradient was non-finite.
    """

    loss: float
    grad_norm: float
    skipped: bool


class Engine(Protocol):
    """One rank's share of a model in training. All ranks call every method together."""

    @property
    def model(self) -> torch.nn.Module:
        """The module to call forward on."""
        ...

    def step(self, micro_batches: Sequence[Batch], *, learning_rate: float) -> StepResult:
        """Forward and backward over every micro batch, then one update or a skip."""
        ...

    def wanted(self) -> list[WantedRange]:
        """Return the ranges this rank holds: what it saves and what it must be given."""
        ...

    def export(self, buffers: dict[str, memoryview]) -> dict[str, float]:
        """Copy every range in ``wanted()`` into its buffer; return the optimizer's scalars.

        The state may change as soon as this returns. Whether it is finite is not asked here.
        """
        ...

    def load(self, buffers: Mapping[str, memoryview], scalars: dict[str, float]) -> None:
        """Set every range in ``wanted()`` from its buffer, so that the next forward uses it.

        Asks for the buffers once each, in that order; one that is shorter than its range sets
        the first elements and leaves the others.
        """
        ...
