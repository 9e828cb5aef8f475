# SPDX-License-Identifier: Apache-2.0
"""One rank's whole work, from an existing process group to the last commit. No Ray."""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from raydist.checkpoint import layout
from raydist.checkpoint.attempt import Attempt, open_attempt
from raydist.checkpoint.group import Group
from raydist.checkpoint.journal import Journal
from raydist.checkpoint.manifest import Manifest, Progress
from raydist.checkpoint.prune import Pruner
from raydist.checkpoint.ranges import WantedRange
from raydist.checkpoint.restore import Restored, restore
from raydist.checkpoint.retention import RetentionPolicy
from raydist.checkpoint.runs import write_run
from raydist.checkpoint.saver import RunIdentity
from raydist.clock import Clock, SystemClock
from raydist.config import RunConfig, config_hash
from raydist.data import Corpus, read_manifest
from raydist.errors import DataError, RaydistError, ResumeError, StorageError
from raydist.metrics.sink import open_sink
from raydist.storage import ObjectStore, open_store
from raydist.train import rng
from raydist.train.engine import Engine
from raydist.train.feed import BatchFeed
from raydist.train.initial_weights import load_initial_weights
from raydist.train.loop import TrainState, train
from raydist.train.saving import start_saving
from raydist.train.task import RankTask
from raydist.train.time_limits import hold_time_limits
from raydist.train.versions import versions
from raydist.world import World, plan_batch

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hooks:
    """What the launcher hears of a run. All ranks, but for ``say``.

    Fields:
        row: One metrics row; rank 0 has recorded it.
        say: One line worth reading. Rank 0 only.
        committed: A checkpoint exists: step and manifest key. Must not block.
    """

    row: Callable[[dict[str, Any]], None]
    say: Callable[[str], None]
    committed: Callable[[int, str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a finished attempt did; rank 0 writes it to `report/attempt-NNNN.json`."""

    attempt: int
    resumed_from_step: int
    step: int
    loss: float | None
    tokens: int
    skipped_steps: int
    committed_step: int
    seconds: float
    sample: str


def run_rank(
    task: RankTask, world: World, *, device: torch.device, group: Group, hooks: Hooks
) -> Outcome:
    """Train, save and resume as one rank of ``group``. All ranks.

    Raises:
        RaydistError: Named for what failed; the same on all ranks where they agreed on it.
    """
    begun = time.monotonic()
    clock = SystemClock()
    config = task.config
    plan = plan_batch(
        global_batch_size=config.batch.global_batch_size,
        micro_batch_size=config.batch.micro_batch_size,
        world_size=world.world_size,
    )
    store = open_store(config.run_url)
    with ExitStack() as stack:
        attempt = _open_attempt(task, store, group, clock)
        if attempt is not None:
            stack.callback(attempt.release)
        number = group.broadcast(attempt.number if attempt else None)
        _check_shared(store, group, number if attempt is None else attempt.tail.number)
        corpus = _open_corpus(task)
        rng.seed_everything(config.seed, world.rank)
        engine = _build_engine(task, plan, device)
        _hold_time_limits(config, world, hooks)
        restored = _restore(store, group, attempt, engine)
        if restored is not None:
            _check_corpus(task, corpus, restored.manifest)
        state = _apply(restored, engine, world, config, hooks)
        pruner = _pruner(config, store, attempt)
        _begin_from_weights(restored, engine, group, config, hooks)
        saving = start_saving(
            stack,
            store=store,
            group=group,
            attempt=attempt,
            attempt_number=number,
            identity=_identity(config, corpus),
            pruner=pruner,
            engine=engine,
            config=config,
            world=world,
            step=state.step,
            progress=lambda now: _progress(now, corpus, config),
            clock=clock,
            say=hooks.say if world.is_main else lambda text: None,
            committed=hooks.committed,
        )
        feed = BatchFeed(
            corpus,
            plan,
            rank=world.rank,
            start=state.data_position,
            num_steps=config.num_steps - state.step,
            device=device,
        )
        stack.callback(feed.close)
        record = _recorder(stack, store, number, world, hooks)
        resumed_from = state.step
        gc.collect()
        gc.freeze()  # What is built by now stays; collections during steps pass it over.
        state = train(
            config=config,
            engine=engine,
            feed=feed,
            state=state,
            after_step=saving.after_step,
            record=record,
            clock=clock,
        )
        sample = ""
        if task.job.sample is not None and config.metrics.sample_tokens:
            sample = task.job.sample(engine.model, config)
        outcome = Outcome(
            attempt=number,
            resumed_from_step=resumed_from,
            step=state.step,
            loss=state.loss,
            tokens=state.data_position * config.data.sequence_length,
            skipped_steps=state.skipped_steps,
            committed_step=saving.committed_step,
            seconds=time.monotonic() - begun,
            sample=sample,
        )
        if attempt is not None:
            _close(store, attempt, pruner, outcome)
        return outcome


def agree(group: Group, action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 and return its result, or raise its error, on every rank."""
    box: dict[str, Any] = {}
    if group.rank == 0:
        try:
            box = {"value": action()}
        except RaydistError as error:
            box = {"error": error}
    box = group.broadcast(box)
    if "error" in box:
        raise box["error"]
    return box["value"]


def _open_attempt(task: RankTask, store: ObjectStore, group: Group, clock: Clock) -> Attempt | None:
    opened: list[Attempt] = []

    def open_it() -> None:
        opened.append(
            open_attempt(
                run=task.config.name,
                store=store,
                driver=task.driver,
                clock=clock,
                seen_attempt=task.seen_attempt,
                takeover=task.takeover,
            )
        )
        write_run(store, task.config, versions=versions(), revision=task.revision, clock=clock)

    agree(group, open_it)
    return opened[0] if opened else None


def _close(store: ObjectStore, attempt: Attempt, pruner: Pruner | None, outcome: Outcome) -> None:
    if pruner is not None:
        pruner.finish()
    store.put(layout.outcome_key(attempt.number), json.dumps(asdict(outcome), indent=1).encode())
    attempt.close("finished")


def _pruner(config: RunConfig, store: ObjectStore, attempt: Attempt | None) -> Pruner | None:
    if attempt is None:
        return None
    policy = RetentionPolicy(
        keep_last=config.checkpoint.keep_last,
        keep_every_steps=config.checkpoint.keep_every_steps,
    )
    return Pruner(store=store, attempt=attempt, policy=policy)


def _check_shared(store: ObjectStore, group: Group, entry_number: int) -> None:
    """Stop when a rank does not see what rank 0 has just written.

    Raises:
        StorageError: Names the ranks.
    """
    entry_number = group.broadcast(entry_number)
    sees = store.size(layout.journal_key(entry_number)) is not None
    blind = [r for r, seen in enumerate(group.broadcast(group.gather(sees))) if not seen]
    if blind:
        raise StorageError(
            problem=f"Ranks {blind} do not see what rank 0 writes to the run's storage.",
            way_out="Set --storage to s3:// or to a directory that every node mounts.",
        )


def _open_corpus(task: RankTask) -> Corpus:
    data = task.config.data
    store = open_store(task.corpus_url)
    manifest = read_manifest(store, where=task.corpus_url)
    if manifest is None:
        raise DataError(
            problem=f"No prepared corpus at {task.corpus_url} as this rank sees it.",
            way_out="Set --storage to s3:// or to a directory that every node mounts.",
        )
    return Corpus(
        store,
        manifest,
        sequence_length=data.sequence_length,
        seed=task.config.seed,
        shuffle=data.shuffle,
    )


def _build_engine(task: RankTask, plan: Any, device: torch.device) -> Engine:
    # Imported here: a rank of one strategy does not pay for the other's libraries.
    if task.config.strategy == "zero3":
        from raydist.train.zero import ZeroEngine

        return ZeroEngine(task.job, task.config, plan, device)
    from raydist.train.ddp import DdpEngine

    return DdpEngine(task.job, task.config, plan, device)


def _hold_time_limits(config: RunConfig, world: World, hooks: Hooks) -> None:
    """Once more, for the groups that came with the engine."""
    timeout_s = config.network.timeout_s
    num_groups = hold_time_limits(timeout_s)
    if world.is_main:
        hooks.say(
            f"process groups: {num_groups}, each with network.timeout_s={timeout_s:g} s for a "
            "collective"
        )


def _restore(
    store: ObjectStore, group: Group, attempt: Attempt | None, engine: Engine
) -> Restored | None:
    commit = agree(group, lambda: Journal(store).newest_commit(attempt.tail) if attempt else None)

    def wanted(manifest: Manifest) -> list[WantedRange]:
        own_rng = rng.wanted(manifest, rank=group.rank, world_size=group.world_size)
        return engine.wanted() + own_rng

    return restore(store=store, group=group, commit=commit, wanted=wanted)


def _apply(
    restored: Restored | None, engine: Engine, world: World, config: RunConfig, hooks: Hooks
) -> TrainState:
    if restored is None:
        if world.is_main:
            hooks.say(f"new run {config.name}: {config.num_steps} steps")
        return TrainState()
    manifest = restored.manifest
    engine.load(restored.buffers, manifest.scalars)
    kept = rng.load(restored.buffers, manifest, rank=world.rank, world_size=world.world_size)
    progress = manifest.progress
    if not kept:
        rng.seed_everything(config.seed, world.rank, progress.step)
    if world.is_main:
        hooks.say(f"resuming run {config.name} at step {progress.step} of {config.num_steps}")
        for reason in restored.skipped:
            hooks.say(f"passed over an invalid checkpoint, {reason}")
        if restored.steps_lost:
            hooks.say(f"{restored.steps_lost} steps that were committed are done again")
        if not kept:
            hooks.say(
                f"random state of {manifest.world_size} ranks does not fit "
                f"{world.world_size}: derived anew from seed, rank and step"
            )
    return TrainState(
        step=progress.step,
        data_position=progress.data_position,
        skipped_steps=progress.skipped_steps,
    )


def _begin_from_weights(
    restored: Restored | None, engine: Engine, group: Group, config: RunConfig, hooks: Hooks
) -> None:
    where = config.model.weights
    if restored is not None or where is None:
        return
    for line in load_initial_weights(engine, config.model, where=where, group=group):
        if group.rank == 0:
            hooks.say(line)


def _progress(state: TrainState, corpus: Corpus, config: RunConfig) -> Progress:
    return Progress(
        step=state.step,
        data_position=state.data_position,
        epoch=state.data_position // corpus.num_samples,
        tokens=state.data_position * config.data.sequence_length,
        skipped_steps=state.skipped_steps,
    )


def _recorder(
    stack: ExitStack, store: ObjectStore, number: int, world: World, hooks: Hooks
) -> Callable[[dict[str, Any]], None]:
    if not world.is_main:
        return hooks.row
    sink = open_sink(store, attempt=number)

    def close() -> None:
        try:
            sink.close()
        except StorageError as error:  # Rows are lost; the run and its checkpoints are not.
            hooks.say(f"metrics of attempt {number} are incomplete: {error}")

    stack.callback(close)

    def record(row: dict[str, Any]) -> None:
        row = {"attempt": number, **row}
        sink.write(row)
        hooks.row(row)

    return record


def _check_corpus(task: RankTask, corpus: Corpus, manifest: Manifest) -> None:
    """Stop when the tokens are not those that the run has been trained on.

    Raises:
        ResumeError: They differ, and the user has not allowed it.
    """
    # One that was imported does not say.
    if manifest.corpus not in ("", corpus.identity) and not task.allow_config_change:
        raise ResumeError(
            problem=f"The corpus at {task.corpus_url} (content {corpus.identity}) is not the one "
            f"that step {manifest.progress.step} was trained on (content {manifest.corpus}).",
            way_out="Restore the source, choose another --name, or say --allow-config-change.",
        )


def _identity(config: RunConfig, corpus: Corpus) -> RunIdentity:
    return RunIdentity(
        corpus=corpus.identity,
        run=config.name,
        strategy=config.strategy,
        precision=config.precision,
        config_hash=config_hash(config),
        versions=versions(),
    )
