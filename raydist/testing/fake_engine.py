# SPDX-License-Identifier: Apache-2.0
"""An Engine without a model: its losses are scripted, its state counts its updates."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from raydist.checkpoint.ranges import TensorSpec, WantedRange
from raydist.testing.fake_clock import FakeClock
from raydist.train.engine import StepResult
from raydist.train.job import Batch

if TYPE_CHECKING:
    import torch

_SPEC = TensorSpec(key="master/updates", shape=(1,), dtype="F32")


class FakeEngine:
    """Implements Engine for a world of one rank.

    Args:
        script: What each step does: a result, or a loss with a gradient norm of 1.
        clock: Moves on by ``step_time_s`` in every step.
        step_time_s: Seconds a step takes.
    """

    def __init__(
        self,
        script: Iterable[StepResult | float],
        *,
        clock: FakeClock,
        step_time_s: float = 0.5,
    ) -> None:
        self._script = iter(script)
        self._clock = clock
        self._step_time_s = step_time_s
        self.updates = 0
        self.batches: list[list[Batch]] = []
        self.learning_rates: list[float] = []

    @property
    def model(self) -> torch.nn.Module:
        """A module that returns what it is given."""
        import torch

        return torch.nn.Identity()

    def step(self, micro_batches: Sequence[Batch], *, learning_rate: float) -> StepResult:
        """Do what the script says next; a step that is not skipped is an update."""
        self._clock.sleep(self._step_time_s)
        self.batches.append(list(micro_batches))
        self.learning_rates.append(learning_rate)
        result = next(self._script)
        if not isinstance(result, StepResult):
            result = StepResult(loss=result, grad_norm=1.0, skipped=False)
        self.updates += not result.skipped
        return result

    def wanted(self) -> list[WantedRange]:
        """One range: the count of updates."""
        return [WantedRange(spec=_SPEC, offset=0, length=1)]

    def export(self, buffers: dict[str, memoryview]) -> dict[str, float]:
        """Give the count of updates, as a tensor and as Adam's step count."""
        struct.pack_into("<f", buffers[_SPEC.key], 0, self.updates)
        return {"adam_step": float(self.updates)}

    def load(self, buffers: Mapping[str, memoryview], scalars: dict[str, float]) -> None:
        """Set the count of updates."""
        (updates,) = struct.unpack("<f", buffers[_SPEC.key])
        self.updates = int(updates)
