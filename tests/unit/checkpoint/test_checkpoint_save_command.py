# SPDX-License-Identifier: Apache-2.0
"""`raydist ckpt save`: asks and waits. Faked: the run, by what it writes to the journal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from async_scenario import AsyncRun, finite_state
from checkpoint_scenario import Fault, WatchedStore

from raydist.checkpoint import layout
from raydist.cli.ckpt_save import Save, save
from raydist.errors import CheckpointError, ConfigError
from raydist.testing.fake_clock import FakeClock
from raydist.testing.memory_store import MemoryStore


class _ClockOfRun(FakeClock):
    """Something happens in the run while the command waits."""

    def __init__(self, happens: Any) -> None:
        super().__init__()
        self._happens = [happens]

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self._happens:
            self._happens.pop()()


def test_save_asks_waits_and_says_what_was_committed(capsys: pytest.CaptureFixture[str]) -> None:
    store = MemoryStore()
    run = AsyncRun(store)

    def answer() -> None:
        assert store.size(layout.SAVE_REQUEST_KEY)
        run.begin(finite_state(1), 17)
        run.settle()

    command = Save(location="somewhere", json=True)
    assert save(command, store, clock=_ClockOfRun(answer)) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"step": 17, "committed": True, "manifest": layout.manifest_key(17, 1)}


def test_save_that_is_abandoned_says_why_with_status_5(
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = MemoryStore()
    bad = WatchedStore(store, Fault(operation="put", part=".safetensors"))
    run = AsyncRun(store, rank_stores={1: bad})

    def answer() -> None:
        run.begin(finite_state(1), 17)
        run.settle()

    assert save(Save(location="somewhere"), store, clock=_ClockOfRun(answer)) == 5
    assert "step 17 was abandoned: rank 1: injected" in capsys.readouterr().out


def test_save_of_a_run_that_ends_first_is_an_error() -> None:
    store = MemoryStore()
    run = AsyncRun(store)
    clock = _ClockOfRun(lambda: run.attempt.close("finished"))
    with pytest.raises(CheckpointError, match="ended before it saved"):
        save(Save(location="somewhere"), store, clock=clock)


def test_save_that_never_comes_leaves_the_request() -> None:
    store = MemoryStore()
    AsyncRun(store)
    with pytest.raises(CheckpointError, match="No save within 60 s"):
        save(Save(location="somewhere", timeout_s=60), store, clock=FakeClock())
    assert store.size(layout.SAVE_REQUEST_KEY)


def test_save_of_what_does_not_train_is_refused() -> None:
    store = MemoryStore()
    with pytest.raises(ConfigError, match="has never trained"):
        save(Save(location="somewhere"), store, clock=FakeClock())
    AsyncRun(store).attempt.close("finished")
    with pytest.raises(ConfigError, match="its last attempt ended"):
        save(Save(location="somewhere"), store, clock=FakeClock())
    assert store.size(layout.SAVE_REQUEST_KEY) is None
