# SPDX-License-Identifier: Apache-2.0
"""The training loop. Faked: engine and clock; the feed is the real one over made-up tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from raydist.config import RunConfig
from raydist.errors import NumericsError
from raydist.metrics.rows import encode_row
from raydist.testing.configs import small_config
from raydist.testing.fake_clock import FakeClock
from raydist.testing.fake_engine import FakeEngine
from raydist.train.engine import Engine, StepResult
from raydist.train.feed import BatchFeed
from raydist.train.loop import SaveFigures, TrainState, train
from raydist.train.schedule import learning_rate
from raydist.world import plan_batch

_FIELDS = {
    "step", "loss", "grad_norm", "learning_rate", "skipped", "skipped_steps", "tokens_seen",
    "step_time_s", "data_wait_s", "save_s", "save_wait_s", "save_skipped", "persist_s",
    "tokens_per_s", "unix_s",
}  # fmt: skip
_SKIP = StepResult(loss=math.nan, grad_norm=math.nan, skipped=True)
_SKIP_WITH_LOSS = StepResult(loss=2.0, grad_norm=math.inf, skipped=True)


class _PositionsAsTokens:
    def batch(self, positions: range) -> NDArray[np.int64]:
        return np.repeat(np.asarray(positions, np.int64)[:, None], 4, axis=1)


@dataclass
class _Run:
    """What a call of train() left behind."""

    config: RunConfig
    clock: FakeClock = field(default_factory=FakeClock)
    rows: list[dict[str, Any]] = field(default_factory=list)
    seen: list[TrainState] = field(default_factory=list)
    saved: list[TrainState] = field(default_factory=list)
    engine: FakeEngine | None = None

    def train(
        self, script: Iterable[StepResult | float], state: TrainState | None = None
    ) -> TrainState:
        state = state or TrainState()
        plan = plan_batch(global_batch_size=8, micro_batch_size=2, world_size=1)
        self.engine = FakeEngine(script, clock=self.clock)
        engine: Engine = self.engine
        feed = BatchFeed(
            _PositionsAsTokens(), plan, rank=0, start=state.data_position,
            num_steps=self.config.num_steps - state.step, device=torch.device("cpu"),
        )  # fmt: skip
        try:
            return train(
                config=self.config, engine=engine, feed=feed, state=state,
                after_step=self._after_step, record=self.rows.append, clock=self.clock,
            )  # fmt: skip
        finally:
            feed.close()

    def _after_step(self, state: TrainState) -> SaveFigures:
        self.seen.append(state)
        every = self.config.checkpoint.every_steps
        if state.step != self.config.num_steps and (every is None or state.step % int(every)):
            return SaveFigures()
        self.saved.append(state)
        self.clock.sleep(3.0)
        return SaveFigures(save_s=2.0, save_wait_s=1.0, save_skipped=True, persist_s=4.0)

    @property
    def saved_steps(self) -> list[int]:
        return [state.step for state in self.saved]

    @property
    def first_positions(self) -> list[int]:
        assert self.engine is not None
        return [int(batches[0]["tokens"][0, 0]) for batches in self.engine.batches]


def _run(**changes: Any) -> _Run:
    return _Run(small_config(**changes))


def test_loop_hands_over_the_state_after_every_step() -> None:
    run = _run()
    state = run.train([2.0] * 10)
    assert [seen.step for seen in run.seen] == list(range(1, 11))
    assert run.seen[-1] == state


def test_loop_ends_with_every_step_done_and_every_sample_consumed() -> None:
    run = _run()
    state = run.train([float(n) for n in range(10)])
    assert state == TrainState(step=10, data_position=80, skipped_steps=0, loss=9.0)
    assert run.first_positions == list(range(0, 80, 8))
    assert run.engine is not None
    assert [len(batches) for batches in run.engine.batches] == [4] * 10


def test_loop_rows_hold_every_field_and_are_valid_rows() -> None:
    run = _run(**{"checkpoint.every_steps": 4})
    run.train([5.0] * 10)
    assert [set(row) for row in run.rows] == [_FIELDS] * 10
    assert [row["step"] for row in run.rows] == list(range(1, 11))
    assert [row["tokens_seen"] for row in run.rows] == [32 * n for n in range(1, 11)]
    for row in run.rows:
        encode_row({"attempt": 1, **row})
        assert (row["loss"], row["grad_norm"], row["skipped"]) == (5.0, 1.0, False)
        assert (row["step_time_s"], row["tokens_per_s"]) == (0.5, 64.0)
        assert row["data_wait_s"] == 0.0
    # Seconds of a save stand in the row of the step after it, and are no step's time.
    figures = ("save_s", "save_wait_s", "save_skipped", "persist_s")
    saving = {row["step"]: tuple(row[name] for name in figures) for row in run.rows}
    assert {step for step, values in saving.items() if any(values)} == {5, 9}
    assert saving[5] == (2.0, 1.0, True, 4.0)
    start = FakeClock().now_unix_s()
    assert [row["unix_s"] - start for row in run.rows[3:5]] == [2.0, 5.5]


def test_loop_skipped_steps_are_counted_and_do_not_advance_the_learning_rate() -> None:
    run = _run(**{"optimizer.warmup_steps": 4})
    state = run.train([4.0, _SKIP, _SKIP_WITH_LOSS, 3.0, _SKIP, 2.0, 1.0, 1.0, 1.0, 1.0])
    assert (state.step, state.skipped_steps) == (10, 3)
    assert run.engine is not None
    assert run.engine.updates == 7
    updates = [0, 1, 1, 1, 2, 2, 3, 4, 5, 6]
    expected = [learning_rate(run.config, updates=n) for n in updates]
    assert run.engine.learning_rates == expected
    assert [row["learning_rate"] for row in run.rows] == expected
    assert [row["skipped_steps"] for row in run.rows] == [0, 1, 2, 2, 3, 3, 3, 3, 3, 3]
    assert run.first_positions == list(range(0, 80, 8))  # the data does go on


def test_loop_loss_of_the_state_is_the_last_finite_one() -> None:
    run = _run(num_steps=3)
    assert run.train([4.0, _SKIP, _SKIP]).loss == 4.0
    run = _run(num_steps=2)
    assert run.train([_SKIP, _SKIP]).loss is None


def test_loop_nonfinite_steps_at_the_limit_stop_the_run_with_advice() -> None:
    run = _run(**{"fault.max_nonfinite_steps": 3, "checkpoint.every_steps": 4})
    with pytest.raises(NumericsError) as caught:
        run.train([1.0, _SKIP, 1.0, 1.0, _SKIP, _SKIP_WITH_LOSS, _SKIP, 1.0])
    text = str(caught.value)
    assert text.startswith("3 steps in a row up to step 7 had a non-finite loss or gradient")
    for advice in (
        "optimizer.learning_rate=0.001",
        "optimizer.warmup_steps=0",
        "fault.max_nonfinite_steps=3",
        "the last checkpoint is untouched",
    ):
        assert advice in text
    assert run.saved_steps == [4]
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 5, 6, 7]


def test_loop_finite_step_between_starts_the_count_anew() -> None:
    run = _run(**{"fault.max_nonfinite_steps": 2})
    state = run.train([_SKIP, 1.0] * 5)
    assert (state.step, state.skipped_steps) == (10, 5)


def test_loop_nonfinite_loss_of_an_update_counts_towards_the_limit() -> None:
    run = _run(**{"fault.max_nonfinite_steps": 2})
    with pytest.raises(NumericsError, match="2 steps in a row up to step 3"):
        run.train([1.0, math.inf, math.nan])
    assert run.rows[-1]["skipped_steps"] == 0


def test_loop_resumed_goes_on_where_the_unbroken_run_was() -> None:
    script = [9.0, _SKIP, 7.0, 6.0, 5.0, _SKIP, 3.0, 2.0, 1.0, 0.5]
    changes = {"optimizer.warmup_steps": 3, "checkpoint.every_steps": 2}
    unbroken = _run(**changes)
    end = unbroken.train(script)
    for saved in unbroken.saved[:-1]:
        resumed = _run(**changes)
        # What a checkpoint keeps: all but the loss.
        begin = TrainState(
            step=saved.step, data_position=saved.data_position, skipped_steps=saved.skipped_steps
        )
        assert resumed.train(script[saved.step :], begin) == end
        assert resumed.first_positions == unbroken.first_positions[saved.step :]
        assert resumed.saved == [s for s in unbroken.saved if s.step > saved.step]
        names = ("step", "loss", "learning_rate", "skipped_steps", "tokens_seen")
        tail = unbroken.rows[saved.step :]
        rows = [[str(row[name]) for name in names] for row in resumed.rows]
        assert rows == [[str(row[name]) for name in names] for row in tail]


def test_loop_of_a_complete_run_does_nothing() -> None:
    run = _run()
    state = TrainState(step=10, data_position=80)
    assert run.train([], state) == state
    assert run.rows == run.saved == []


def test_fake_engine_state_goes_out_and_in() -> None:
    clock = FakeClock()
    engine = FakeEngine([1.0, _SKIP, 1.0], clock=clock)
    for _ in range(3):
        engine.step([], learning_rate=0.1)
    buffers = {w.spec.key: memoryview(bytearray(w.nbytes)) for w in engine.wanted()}
    scalars = engine.export(buffers)
    assert scalars == {"adam_step": 2.0}
    other = FakeEngine([], clock=clock)
    assert other.wanted() == engine.wanted()
    other.load(buffers, scalars)
    assert other.updates == 2
