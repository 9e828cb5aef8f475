# SPDX-License-Identifier: Apache-2.0
"""Saves on demand. Faked: the store's refusals. Real: the request object."""

from __future__ import annotations

import pytest
from checkpoint_scenario import Fault, WatchedStore

from raydist.checkpoint import layout
from raydist.checkpoint.requests import RequestWatch, request_save
from raydist.errors import StorageError
from raydist.testing.fake_clock import FakeClock
from raydist.testing.memory_store import MemoryStore


def test_request_is_taken_once_and_goes_away() -> None:
    store = MemoryStore()
    watch = RequestWatch(store, every_s=1e6)
    watch.look()
    assert not watch.take()
    request_save(store, clock=FakeClock())
    request_save(store, clock=FakeClock())
    watch.look()
    assert store.size(layout.SAVE_REQUEST_KEY) is None
    assert (watch.take(), watch.take()) == (True, False)
    request_save(store, clock=FakeClock())
    watch.look()
    assert watch.take()
    watch.close()


def test_request_that_cannot_be_deleted_counts_once() -> None:
    store = WatchedStore(MemoryStore(), Fault(operation="delete"))
    watch = RequestWatch(store, every_s=1e6)
    request_save(store, clock=FakeClock())
    for expected in (True, False):
        with pytest.raises(StorageError):
            watch.look()
        assert watch.take() is expected
    watch.close()


def test_request_is_found_by_the_thread_and_in_spite_of_a_failing_store() -> None:
    store = WatchedStore(MemoryStore(), Fault(operation="get", times=2))
    request_save(store, clock=FakeClock())
    watch = RequestWatch(store, every_s=0.01)
    assert watch._is_requested.wait(20)
    assert watch.take()
    watch.close()
    watch._thread.join(20)
    assert not watch._thread.is_alive()
