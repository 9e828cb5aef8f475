# SPDX-License-Identifier: Apache-2.0
"""Who may open the next attempt. Faked: the clock and the store; the journal is real."""

from __future__ import annotations

import pytest

from raydist.checkpoint.attempt import open_attempt
from raydist.errors import FencedError
from raydist.testing.fake_clock import FakeClock
from raydist.testing.memory_store import MemoryStore


def test_open_after_another_driver_took_over_is_fenced_whatever_became_of_it() -> None:
    store = MemoryStore()
    first = open_attempt(run="r", store=store, driver="a", clock=FakeClock(), seen_attempt=0)
    other = open_attempt(
        run="r", store=store, driver="b", clock=FakeClock(), seen_attempt=1, takeover=True
    )
    other.close("finished")
    for takeover in (False, True):
        with pytest.raises(FencedError, match="attempt 2"):
            open_attempt(
                run="r", store=store, driver="a", clock=FakeClock(), seen_attempt=0,
                takeover=takeover,
            )  # fmt: skip
    first.release()


def test_open_by_the_same_driver_again_goes_on() -> None:
    store = MemoryStore()
    numbers = []
    for _ in range(3):
        attempt = open_attempt(run="r", store=store, driver="a", clock=FakeClock(), seen_attempt=0)
        numbers.append(attempt.number)
        attempt.release()
    assert numbers == [1, 2, 3]


def test_open_where_the_journal_was_lost_overwrites_no_attempt() -> None:
    store = MemoryStore()
    store.put("checkpoints/step-000000000004/attempt-0007/manifest.json", b"{}")
    attempt = open_attempt(run="r", store=store, driver="a", clock=FakeClock())
    assert attempt.number == 8
    attempt.release()
