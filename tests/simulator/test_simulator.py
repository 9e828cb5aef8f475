# SPDX-License-Identifier: Apache-2.0
"""The commit protocol under thousands of seeded schedules, and under bugs planted into it.

Real: journal, attempts, lease, saver, restore decision, retention. Simulated: time, storage,
processes and collectives; see simulated_run. A seed that fails is shown, request by request, by

    python tests/simulator/simulated_run.py SEED
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import planted_bugs
import pytest
import simulated_run
from planted_bugs import Plant
from simulated_run import Simulation, simulate

from raydist.checkpoint.layout import CHECKPOINTS_PREFIX

_NUM_SEEDS = 10_000
_NUM_SHARES = 2
_MAX_SEEDS = 4_000  # the rarest planted bug shows in 2 of 1,000


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # every fault would be logged, thousands of times
    yield
    logging.disable(logging.NOTSET)


def _failures(share: int) -> list[str]:
    logging.disable(logging.CRITICAL)
    found = []
    for seed in range(share, _NUM_SEEDS, _NUM_SHARES):
        problem = simulate(seed)
        if problem:
            found.append(f"seed {seed}: {problem}")
    return found


@pytest.mark.timeout(300)
def test_invariants_hold_in_ten_thousand_schedules() -> None:
    with ProcessPoolExecutor(_NUM_SHARES, mp_context=get_context("spawn")) as pool:
        failures = [line for share in pool.map(_failures, range(_NUM_SHARES)) for line in share]
    replay = f"{sys.executable} {simulated_run.__file__} SEED"
    assert failures == [], f"{len(failures)} seeds fail; {replay} shows one"


_BUGS: list[tuple[Plant, str]] = [
    (planted_bugs.append_over_what_is_there, "I2: journal/.* was overwritten"),
    (planted_bugs.believe_the_hint, "still busy at|I[23]"),
    (planted_bugs.take_a_lost_reply_for_success, "I[12356]"),
    (planted_bugs.take_a_lost_reply_for_failure, "I6: .* after its ranks were told that it is not"),
    (planted_bugs.commit_before_all_parts_are_confirmed, "I1: entry .* without .*safetensors"),
    (planted_bugs.write_again_where_an_earlier_save_wrote, "I[16]"),
    (planted_bugs.go_on_when_replaced, "I2: attempt 1 wrote `.*` while 2 held the run"),
    (planted_bugs.start_beside_a_living_writer, "I2: d. opened over .* which lives"),
    (planted_bugs.prune_before_the_newer_is_readable, "I1: .* prunes the newest valid checkpoint"),
    (planted_bugs.delete_before_the_entry, "I1: .* of committed entry .* was deleted"),
    (planted_bugs.forget_the_garbage, "I7: .* belongs to no checkpoint"),
    (planted_bugs.collect_what_is_being_written, "I1: entry .* without"),
    (planted_bugs.read_what_was_pruned, "I[123]"),
]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("plant", "message"), _BUGS, ids=lambda v: getattr(v, "__name__", ""))
def test_simulator_finds_a_planted_bug(
    monkeypatch: pytest.MonkeyPatch, plant: Plant, message: str
) -> None:
    plant(monkeypatch)
    problem = next(
        filter(None, map(simulate, range(_MAX_SEEDS))), f"not found in {_MAX_SEEDS} seeds"
    )
    assert re.search(message, problem), problem


def test_bugs_are_all_planted() -> None:
    defined = {
        name
        for name, value in vars(planted_bugs).items()
        if getattr(value, "__module__", "") == planted_bugs.__name__
    }
    assert defined == {plant.__name__ for plant, _ in _BUGS}


def test_seed_is_a_schedule() -> None:
    def trace(seed: int) -> list[str]:
        simulation = Simulation(seed, trace=True)
        simulation.run()
        return simulation.world.trace or []

    for seed in range(20):
        assert trace(seed) == trace(seed)
    assert trace(1) != trace(2)


def test_schedules_hold_what_they_are_for() -> None:
    """A simulator whose faults never happen finds nothing."""
    notes: list[str] = []
    endings: set[str] = set()
    kinds: set[str] = set()
    for seed in range(400):
        simulation = Simulation(seed, trace=True)
        simulation.run()
        notes += simulation.world.trace or []
        endings |= {ending.partition(":")[0] for ending in simulation.endings.values()}
        kinds |= {entry["kind"] for entry in simulation.checker.entries}
    text = "\n".join(notes)
    for part in (
        rf"put {CHECKPOINTS_PREFIX}\S+ takes effect unseen",
        r"put journal/0\d+\.json takes effect unseen",
        r"put journal/0\d+\.json -> ObjectExistsError",
        r"is killed at put \S+manifest\.json \(late\)",
        r"is killed at put journal/0\S+ \(no reply\)",
        r"is killed at delete ",
        r"is killed at get ",
        r"stands still until",
        r"the storage loses ",
        r"the storage alters ",
        r"delete \S+: refused",
        r"attempt-\d+\.2/manifest\.json",
    ):
        assert re.search(part, text), part
    assert kinds == {"opened", "committed", "abandoned", "pruned", "closed"}
    assert endings >= {
        "finished",
        "killed",
        "FencedError",
        "RunAliveError",
        "CheckpointError",
        "StorageError",
    }
