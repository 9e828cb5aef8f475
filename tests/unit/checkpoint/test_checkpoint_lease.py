# SPDX-License-Identifier: Apache-2.0
"""Whether a writer lives: its process and its lease. Real: processes of this host, threads.

Faked: beats that the store refuses.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from checkpoint_scenario import Fault, WatchedStore

from raydist.checkpoint import lease as lease_module
from raydist.checkpoint.attempt import open_attempt
from raydist.checkpoint.layout import lease_key
from raydist.checkpoint.lease import Holder, RenewalThread
from raydist.testing.fake_clock import FakeClock
from raydist.testing.memory_store import MemoryStore


def test_holder_is_read_back_from_its_text() -> None:
    for holder in (Holder.this_process(), Holder(host="a:b/c", pid=12, started="gone")):
        assert Holder.parse(str(holder)) == holder


def test_holder_of_this_process_lives_and_of_an_ended_one_is_dead() -> None:
    here = Holder.this_process()
    assert not here.is_dead_here()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started = lease_module._start_time(child.pid)
        there = replace(here, pid=child.pid, started=started)
        assert not there.is_dead_here()
        assert not replace(there, host="elsewhere").is_dead_here()
        child.kill()
        child.wait()
    assert there.is_dead_here()
    assert not replace(there, host="elsewhere").is_dead_here()


class BeatStore(WatchedStore):
    """Says when each lease was put or refused."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__(MemoryStore(), *faults)
        self.beaten = threading.Semaphore(0)

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        try:
            super().put(key, data, if_absent=if_absent)
        finally:
            if "alive" in key:
                self.beaten.release()


def test_lease_beats_on_after_a_failed_beat_and_stops_with_the_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease_module, "LEASE_RENEW_S", 0.001)
    store = BeatStore()
    attempt = open_attempt(run="toy", store=store, driver="driver-a", clock=FakeClock())
    store.faults.append(Fault(operation="put", part="alive", times=2))
    for _ in range(5):
        assert store.beaten.acquire(timeout=20)
    assert json.loads(store.get(lease_key(1)))["beats"] >= 4
    assert json.loads(store.get(lease_key(1)))["holder"] == str(Holder.this_process())
    attempt.close("finished")
    assert isinstance(attempt.renewal, RenewalThread)
    thread = attempt.renewal.thread
    thread.join(20)
    assert not thread.is_alive()
