# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, metrics, saves, and the limit on non-finite steps. No Ray."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from raydist.clock import Clock
from raydist.config import RunConfig
from raydist.errors import NumericsError
from raydist.train.engine import Engine
from raydist.train.job import Batch
from raydist.train.schedule import learning_rate


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """How far training has come.

    Fields:
        step: Optimizer steps done, skipped ones among them.
        data_position: Samples consumed; the next step begins there.
        skipped_steps: Steps without an update.
        loss: Of the last step with a finite one.
    """

    step: int = 0
    data_position: int = 0
    skipped_steps: int = 0
    loss: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveFigures:
    """What saving did between two steps; all zero between most.

    Fields:
        save_s: Training stood still for a save: the agreement and the copy of the state.
        save_wait_s: It stood still until an earlier save was over, or the last one.
        save_skipped: A save was due and left out since the one before was not over.
        persist_s: A save that ended since the step before took this long behind the steps.
    """

    save_s: float = 0.0
    save_wait_s: float = 0.0
    save_skipped: bool = False
    persist_s: float = 0.0


class Feed(Protocol):
    """Micro batches in order."""

    def next(self) -> list[Batch]:
        """Return the next step's micro batches."""
        ...


def train(
    *,
    config: RunConfig,
    engine: Engine,
    feed: Feed,
    state: TrainState,
    after_step: Callable[[TrainState], SaveFigures],
    record: Callable[[dict[str, Any]], None],
    clock: Clock,
) -> TrainState:
    """Run optimizer steps up to ``config.num_steps``. All ranks.

    Args:
        config: The run.
        engine: This rank's share of the model.
        feed: Begins at ``state.data_position``.
        state: Where to begin.
        after_step: Saves when it is time; called after every step.
        record: Takes one metrics row per step.
        clock: Times the steps.

    Returns:
        The state after the last step.

    Raises:
        NumericsError: ``fault.max_nonfinite_steps`` steps in a row were not finite.
    """
    tokens_per_step = config.batch.global_batch_size * config.data.sequence_length
    nonfinite_in_a_row = 0
    saving = SaveFigures()
    while state.step < config.num_steps:
        begun = clock.monotonic_s()
        micro_batches = feed.next()
        data_wait_s = clock.monotonic_s() - begun
        rate = learning_rate(config, updates=state.step - state.skipped_steps)
        result = engine.step(micro_batches, learning_rate=rate)
        step_time_s = clock.monotonic_s() - begun
        is_finite = math.isfinite(result.loss) and not result.skipped
        state = replace(
            state,
            step=state.step + 1,
            data_position=state.data_position + config.batch.global_batch_size,
            skipped_steps=state.skipped_steps + result.skipped,
            loss=result.loss if math.isfinite(result.loss) else state.loss,
        )
        record(
            {
                "step": state.step,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "learning_rate": rate,
                "skipped": result.skipped,
                "skipped_steps": state.skipped_steps,
                "tokens_seen": state.data_position * config.data.sequence_length,
                "step_time_s": step_time_s,
                "data_wait_s": data_wait_s,
                **asdict(saving),  # between this step and the one before
                "tokens_per_s": tokens_per_step / step_time_s,
                "unix_s": clock.now_unix_s(),
            }
        )
        nonfinite_in_a_row = 0 if is_finite else nonfinite_in_a_row + 1
        if nonfinite_in_a_row >= config.fault.max_nonfinite_steps:
            raise NumericsError(
                problem=f"{nonfinite_in_a_row} steps in a row up to step {state.step} had a "
                "non-finite loss or gradient; non-finite gradients were never applied.",
                way_out=_numerics_advice(config),
            )
        saving = after_step(state)
    return state


def _numerics_advice(config: RunConfig) -> str:
    return (
        f"Lower optimizer.learning_rate={config.optimizer.learning_rate:g}, lengthen "
        f"optimizer.warmup_steps={config.optimizer.warmup_steps}, look at the data of these "
        f"steps, or raise fault.max_nonfinite_steps={config.fault.max_nonfinite_steps}; the last "
        "checkpoint is untouched."
    )
