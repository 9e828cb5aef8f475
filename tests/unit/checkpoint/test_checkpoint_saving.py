# SPDX-License-Identifier: Apache-2.0
"""The loop's saves (raydist.train.saving): when, over which ranks, and what the rows say.

Faked: ranks are threads, time moves only where a test moves it. Real: the saving threads, the
journal and everything else of raydist.checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from async_scenario import AsyncRun, GatedStore, finite_state
from checkpoint_scenario import Fault, WatchedStore, assert_restored, entries, restore_world

from raydist.checkpoint.group import Group
from raydist.checkpoint.manifest import Progress
from raydist.errors import CheckpointError
from raydist.storage import ObjectStore
from raydist.testing.configs import small_config
from raydist.testing.fake_clock import FakeClock
from raydist.testing.memory_store import MemoryStore
from raydist.train.loop import SaveFigures, TrainState
from raydist.train.saving import Saving


@dataclass
class Run:
    """Two ranks that step together; ``during`` is called on every rank after each step."""

    store: ObjectStore
    num_steps: int = 10
    settings: dict[str, Any] = field(default_factory=dict)
    rank_stores: Mapping[int, ObjectStore] = field(default_factory=dict)
    step_s: float = 1.0
    during: Callable[[int, int], None] = lambda rank, step: None
    requests: set[int] = field(default_factory=set)
    said: list[str] = field(default_factory=list)
    figures: dict[tuple[int, int], SaveFigures] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = small_config(
            num_steps=self.num_steps, **{f"checkpoint.{k}": v for k, v in self.settings.items()}
        )
        self.toy = AsyncRun(
            self.store,
            rank_stores=self.rank_stores,
            max_abandoned=self.config.checkpoint.max_abandoned,
        )
        self.clocks = [FakeClock(), FakeClock()]

    def train(self) -> list[int | BaseException]:
        """Return the last committed step as each rank knows it, or its error."""
        return self.toy.training.outcomes(self._train)

    def _train(self, member: Group) -> int:
        rank, clock = member.rank, self.clocks[member.rank]
        step = 0

        def export(views: dict[str, memoryview]) -> dict[str, float]:
            return self.toy.export(finite_state(step), rank, step)(views)

        saving = Saving(
            config=self.config,
            background=self.toy.savers[rank],
            export=export,
            progress=lambda state: Progress(
                step=state.step, data_position=0, epoch=0, tokens=0, skipped_steps=0
            ),
            num_nodes=1,
            step=0,
            clock=clock,
            say=self.said.append if rank == 0 else lambda text: None,
            take_request=lambda: step in self.requests,
        )
        for step in range(1, self.num_steps + 1):
            clock.sleep(self.step_s)
            self.figures[rank, step] = saving.after_step(TrainState(step=step))
            self.during(rank, step)
        return saving.committed_step

    def committed(self) -> list[int]:
        return [e.facts["step"] for e in entries(self.store) if e.kind == "committed"]


def test_saving_commits_every_n_steps_and_the_last_one() -> None:
    store = MemoryStore()
    run = Run(store, settings={"every_steps": 3})
    assert run.train() == [10, 10]
    assert run.committed() == [3, 6, 9, 10]
    assert_restored(restore_world(store, 3), finite_state(10))
    assert run.said == []


def test_saving_of_a_last_step_that_is_due_anyway_is_one_save() -> None:
    run = Run(MemoryStore(), settings={"every_steps": 5})
    assert run.train() == [10, 10]
    assert run.committed() == [5, 10]


def test_saving_by_rank_0s_clock_is_the_same_step_on_all_ranks() -> None:
    store = MemoryStore()
    run = Run(store, num_steps=40, settings={"every_steps": None, "every_s": 12.0})
    run.clocks[1].sleep(1e6)
    assert run.train() == [40, 40]
    assert run.committed() == [12, 24, 36, 40]


def test_saving_on_request_is_made_at_the_next_look() -> None:
    run = Run(MemoryStore(), num_steps=30, settings={"every_steps": None})
    run.requests = set(range(7, 12))  # rank 0 keeps it until it is taken
    run.train()
    first = run.committed()[0]
    assert 7 <= first < 12
    assert run.committed()[-1] == 30


def test_saving_with_skip_leaves_out_what_is_due_while_one_is_in_flight() -> None:
    gated = GatedStore(MemoryStore())
    run = Run(gated, settings={"every_steps": 2, "when_busy": "skip"})

    def during(rank: int, step: int) -> None:
        if step == 5:  # after step 4 was skipped, before step 6
            gated.gate.set()
            assert run.toy.savers[rank].wait(20)

    run.during = during
    assert run.train() == [10, 10]
    committed = run.committed()
    assert committed[:2] == [2, 6]
    assert 4 not in committed
    skipped = {step for (rank, step), f in run.figures.items() if f.save_skipped and rank == 1}
    assert 4 in skipped
    assert "save at step 4 skipped: the one before is not over" in run.said
    assert sorted({*committed, *skipped} | {10}) == [2, 4, 6, 8, 10]


def test_saving_with_wait_saves_every_due_step() -> None:
    gated = GatedStore(MemoryStore())
    run = Run(gated, settings={"every_steps": 2})
    # The gate opens once training waits for it: at step 4, the first due while 2 is in flight.
    original = run.toy.savers[0].wait

    def wait(limit_s: float | None = None) -> bool:
        gated.gate.set()
        return original(limit_s)

    run.toy.savers[0].wait = wait  # type: ignore[method-assign]
    assert run.train() == [10, 10]
    assert run.committed() == [2, 4, 6, 8, 10]
    assert not any(f.save_skipped for f in run.figures.values())


def test_saving_says_why_a_save_was_abandoned_and_goes_on() -> None:
    store = MemoryStore()
    fault = Fault(operation="put", part="rank-00001", times=1)
    run = Run(store, settings={"every_steps": 4}, rank_stores={1: WatchedStore(store, fault)})
    assert run.train() == [10, 10]
    assert run.committed() == [8, 10]
    assert len(run.said) == 1
    assert run.said[0].startswith("save at step 4 abandoned: rank 1: injected: put checkpoints/")


def test_saving_repeats_the_last_save_until_it_is_committed() -> None:
    store = MemoryStore()
    fault = Fault(operation="put", part="rank-00001", times=2)
    run = Run(store, settings={"every_steps": None}, rank_stores={1: WatchedStore(store, fault)})
    assert run.train() == [10, 10]
    assert run.committed() == [10]
    assert [entry.kind for entry in entries(store)].count("abandoned") == 2


def test_saving_ends_on_every_rank_at_one_step_when_the_budget_is_spent() -> None:
    store = MemoryStore()
    bad = WatchedStore(store, Fault(operation="put", part="rank-00001"))
    run = Run(store, settings={"every_steps": 2, "max_abandoned": 2}, rank_stores={1: bad})
    run.during = lambda rank, step: run.toy.savers[rank].wait(20) and None
    errors = run.train()
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    assert {str(error) for error in errors} == {str(errors[0])}
    last = {rank: max(step for r, step in run.figures if r == rank) for rank in (0, 1)}
    assert last[0] == last[1] < 10
    assert run.committed() == []


def test_saving_that_never_succeeds_at_the_end_raises_on_every_rank() -> None:
    store = MemoryStore()
    bad = WatchedStore(store, Fault(operation="put", part="rank-00001"))
    run = Run(store, settings={"every_steps": None}, rank_stores={1: bad})
    for error in run.train():
        assert isinstance(error, CheckpointError)
        assert "3 saves in a row were abandoned, the last at step 10" in str(error)


def test_saving_figures_add_up_to_the_saves_there_were() -> None:
    run = Run(MemoryStore(), settings={"every_steps": 5})
    run.during = lambda rank, step: run.toy.savers[rank].wait(20) and None
    run.train()
    persisted = [step for (rank, step), f in run.figures.items() if rank == 0 and f.persist_s]
    assert persisted in ([5, 10], [6, 10])  # the first may be over before its call returns


@pytest.mark.parametrize("is_agreed", [True, False])
def test_saving_closed_in_the_middle_lets_the_save_in_flight_end(is_agreed: bool) -> None:
    gated = GatedStore(MemoryStore())
    toy = AsyncRun(gated)
    toy.begin(finite_state(1), 1)
    assert gated.reached.wait(20)
    saving = Saving(
        config=small_config(), background=toy.savers[0], export=lambda views: {},
        progress=lambda state: Progress(
            step=state.step, data_position=0, epoch=0, tokens=0, skipped_steps=0
        ),
        num_nodes=1, step=0, clock=FakeClock(), say=print, take_request=lambda: False,
    )  # fmt: skip
    gated.gate.set()
    saving.close(is_agreed=is_agreed)
    assert not toy.savers[0].is_busy
    toy.settle()
    assert [entry.kind for entry in entries(gated.inner)] == ["opened", "committed"]
