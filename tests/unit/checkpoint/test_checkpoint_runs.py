# SPDX-License-Identifier: Apache-2.0
"""What --resume makes of what lies under a run's name. Real: MemoryStore. Faked: time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest
from checkpoint_scenario import Fault, ToyRun, WatchedStore, random_state

from raydist.checkpoint.attempt import Holder
from raydist.checkpoint.journal import Entry, Journal
from raydist.checkpoint.layout import RUN_KEY, lease_key, manifest_key
from raydist.checkpoint.runs import RunState, decide_start, read_state, write_run
from raydist.config import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    mathematics,
)
from raydist.errors import CheckpointError, FailureKind, ResumeError, RunAliveError
from raydist.storage import ObjectStore
from raydist.testing.fake_clock import FakeClock
from raydist.testing.memory_store import MemoryStore

CONFIG = RunConfig(
    name="toy",
    num_steps=10,
    storage="/somewhere/runs",
    model=ModelConfig(
        vocab_size=300,
        hidden_size=8,
        intermediate_size=16,
        num_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    ),
    batch=BatchConfig(global_batch_size=8, micro_batch_size=2),
    optimizer=OptimizerConfig(learning_rate=0.1),
    data=DataConfig(source="python-stdlib", sequence_length=16),
)
Mode = Callable[[ObjectStore], None]


def record(store: ObjectStore, config: RunConfig = CONFIG) -> None:
    write_run(store, config, versions={"torch": "2"}, revision="abc", clock=FakeClock())


def empty(store: ObjectStore) -> None:
    """Nothing lies there."""


def opened(store: ObjectStore) -> None:
    record(store)
    ToyRun(store).attempt.close("worker_lost")


def uncommitted(store: ObjectStore) -> None:
    opened(store)
    store.put("checkpoints/step-000000000005/attempt-0001/rank-00000-of-00002.safetensors", b"x")


def without_journal(store: ObjectStore) -> None:
    """The journal was lost, or the folder copied without it."""
    store.put("checkpoints/step-000000000005/attempt-0001/rank-00000-of-00002.safetensors", b"x")


def committed(store: ObjectStore) -> None:
    record(store)
    run = ToyRun(store)
    run.save(random_state(1), 4)
    run.save(random_state(1), 8)
    run.attempt.close("interrupted")


def start(store: ObjectStore, config: RunConfig = CONFIG, **flags: bool) -> RunState:
    return decide_start(config, store, clock=FakeClock(), **flags)


@pytest.mark.parametrize(
    ("mode", "found", "step", "message"),
    [
        ("never", empty, 0, None),
        ("never", opened, 0, None),
        ("never", uncommitted, 0, None),
        ("never", without_journal, 0, None),
        ("never", committed, None, "--resume never: .* toy .*step 8"),
        ("auto", empty, 0, None),
        ("auto", opened, 0, None),
        ("auto", uncommitted, 0, None),
        ("auto", without_journal, None, "toy has checkpoint objects .*rank-00000.* no journal"),
        ("auto", committed, 8, None),
        ("must", empty, None, "--resume must: .* toy .*/somewhere/runs"),
        ("must", opened, None, "--resume must"),
        ("must", uncommitted, None, "--resume must"),
        ("must", committed, 8, None),
    ],
)
def test_resume_mode_and_what_is_there_begin_at_a_step_or_are_refused(
    mode: str, found: Mode, step: int | None, message: str | None
) -> None:
    store = MemoryStore()
    found(store)
    config = dataclasses.replace(CONFIG, resume=mode)
    before = {key: store.get(key) for key, _ in store.list("")}
    if message is None:
        state = start(store, config)
        assert state.step == step
        assert (state.commit is None) == (step == 0)
    else:
        with pytest.raises(ResumeError, match=message) as caught:
            start(store, config)
        assert "--" in caught.value.way_out
        assert caught.value.kind is FailureKind.INPUT
    assert {key: store.get(key) for key, _ in store.list("")} == before


def test_state_of_a_run_says_its_mathematics_tail_and_newest_commit() -> None:
    store = MemoryStore()
    assert read_state(store) == RunState(mathematics=None, tail=None, commit=None)
    record(store)
    run = ToyRun(store)
    run.save(random_state(1), 4)
    state = read_state(store)
    assert state.commit is not None
    assert state.commit.facts["manifest"] == manifest_key(4, 1)
    assert state.step == 4
    assert state.mathematics == mathematics(CONFIG)
    run.attempt.close("interrupted")
    again = ToyRun(store)
    again.attempt.close("finished")
    state = read_state(store)
    assert state.tail == again.attempt.tail
    assert state.step == 4


def test_state_takes_five_requests_and_no_listing() -> None:
    store = WatchedStore(MemoryStore())
    committed(store)
    store.requests.clear()
    start(store)
    assert {request.operation for request in store.requests} == {"get"}
    assert len(store.requests) <= 5


@pytest.mark.parametrize("raw", [b"", b"garbage", b"\xff", b"[]", b"{}", b"null"])
def test_state_with_an_unreadable_run_record_is_an_error_naming_it(raw: bytes) -> None:
    store = MemoryStore()
    store.put(RUN_KEY, raw)
    with pytest.raises(CheckpointError, match=RUN_KEY):
        read_state(store)


def test_run_record_holds_configuration_versions_and_revision() -> None:
    store = MemoryStore()
    record(store)
    tree = json.loads(store.get(RUN_KEY))
    assert tree["format"] == 1
    assert tree["config"]["batch"] == {"global_batch_size": 8, "micro_batch_size": 2}
    assert tree["versions"] == {"torch": "2"}
    assert tree["revision"] == "abc"
    assert tree["written_unix_s"] == FakeClock().now_unix_s()


def changed(**sections: dict[str, object]) -> RunConfig:
    return dataclasses.replace(
        CONFIG,
        **{
            name: dataclasses.replace(getattr(CONFIG, name), **values)
            for name, values in sections.items()
        },
    )


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(CONFIG, strategy="ddp"),
        changed(batch={"micro_batch_size": 4}),
        changed(scaling={"workers": 5}),
        changed(checkpoint={"every_steps": 1}),
    ],
)
def test_resume_with_the_work_spread_otherwise_is_allowed(config: RunConfig) -> None:
    store = MemoryStore()
    committed(store)
    assert start(store, config).step == 8


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (changed(optimizer={"learning_rate": 0.2}), "optimizer.learning_rate: 0.1 -> 0.2"),
        (changed(batch={"global_batch_size": 16}), "batch.global_batch_size: 8 -> 16"),
        (dataclasses.replace(CONFIG, seed=1), "seed: 0 -> 1"),
        (dataclasses.replace(CONFIG, num_steps=20), "optimizer.decay_steps: 10 -> 20"),
        (dataclasses.replace(CONFIG, precision="fp32"), "precision: 'bf16' -> 'fp32'"),
        (changed(data={"sequence_length": 32}), "data.sequence_length: 16 -> 32"),
    ],
)
def test_resume_with_other_mathematics_is_refused_with_the_diff_until_allowed(
    config: RunConfig, line: str
) -> None:
    store = MemoryStore()
    committed(store)
    with pytest.raises(ResumeError) as caught:
        start(store, config)
    assert f"    {line}" in str(caught.value).splitlines()
    assert "--allow-config-change" in caught.value.way_out
    assert start(store, config, allow_config_change=True).step == 8


@pytest.mark.parametrize("allow", [False, True])
def test_resume_of_another_model_is_refused_whatever_is_allowed(allow: bool) -> None:
    store = MemoryStore()
    committed(store)
    config = changed(model={"num_layers": 3}, optimizer={"learning_rate": 0.2})
    with pytest.raises(ResumeError) as caught:
        start(store, config, allow_config_change=allow)
    text = str(caught.value)
    assert "model.num_layers: 2 -> 3" in text
    assert "optimizer.learning_rate: 0.1 -> 0.2" in text
    assert "--allow-config-change" not in text
    assert "--name" in text


def test_resume_with_its_initial_weights_elsewhere_is_allowed_when_told() -> None:
    store = MemoryStore()
    committed(store)
    config = changed(model={"weights": "/moved"})
    with pytest.raises(ResumeError, match=r"model.weights: None -> '/moved'(.|\n)*--allow-config"):
        start(store, config)
    assert start(store, config, allow_config_change=True).step > 0


def test_start_with_another_model_before_the_first_commit_is_allowed() -> None:
    store = MemoryStore()
    opened(store)
    assert start(store, changed(model={"num_layers": 3})).step == 0


class Elsewhere(FakeClock):
    """The run's holder on another host renews its lease as time passes."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__()
        self._store = store

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        raw = json.dumps({"beats": 9 + int(self.monotonic_s() / 3)}).encode()
        self._store.put(lease_key(1), raw)


def test_start_of_a_run_that_lives_elsewhere_is_refused_unless_taken_over() -> None:
    store = MemoryStore()
    holder = str(Holder(host="other", pid=4, started="9"))
    tail = Entry(
        number=1,
        kind="opened",
        attempt=1,
        driver="b",
        holder=holder,
        unix_s=0.0,
        last_commit=None,
    )
    Journal(store).append(tail)
    with pytest.raises(RunAliveError, match=r"toy .*other:4:9"):
        decide_start(CONFIG, store, clock=Elsewhere(store))
    clock = Elsewhere(store)
    assert decide_start(CONFIG, store, clock=clock, takeover=True).step == 0
    assert clock.monotonic_s() == 0


def test_start_while_the_store_fails_is_its_error() -> None:
    store = WatchedStore(MemoryStore(), Fault(operation="get", part=RUN_KEY))
    with pytest.raises(Exception, match="injected"):
        start(store)
