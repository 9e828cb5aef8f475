# SPDX-License-Identifier: Apache-2.0
"""Every check that needs no machine, before one is asked for. Nothing is written."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from raydist.checkpoint.runs import RunState, decide_start
from raydist.clock import Clock
from raydist.config import RunConfig
from raydist.config.cli import Request
from raydist.config.deepspeed_import import check_world
from raydist.data import CorpusSource, find_source
from raydist.errors import ConfigError, DataError
from raydist.storage import open_store
from raydist.storage.open import absolute_url, check_writable
from raydist.world import BatchPlan, plan_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A request that may start.

    Fields:
        config: Resolved; its storage no longer depends on the working directory.
    """

    config: RunConfig
    source: CorpusSource
    state: RunState

    @property
    def seen_attempt(self) -> int:
        """The run's newest attempt as the checks found it, 0 for none."""
        return self.state.tail.attempt if self.state.tail else 0


def prepare_request(request: Request, *, clock: Clock) -> Prepared:
    """Check configuration, storage, corpus and resume mode.

    Raises:
        ConfigError: With its kinds: what was asked cannot be.
        DataError: The corpus is missing or too small.
        StorageUnusableError: The storage cannot be written.
    """
    config = replace(request.config, storage=resolve_storage(request.config.storage))
    if config.model.weights is not None:
        found = resolve_storage(config.model.weights, key="model.weights")
        config = replace(config, model=replace(config.model, weights=found))
    if config.scaling.planned_workers is not None:
        batch_for(request, config, config.scaling.planned_workers)
    check_writable(config.storage)
    source = find_source(config.data.source, storage=config.storage)
    check_corpus(config, source)
    store = open_store(config.run_url)
    state = decide_start(
        config,
        store,
        clock=clock,
        takeover=request.takeover,
        allow_config_change=request.allow_config_change,
    )
    return Prepared(config=config, source=source, state=state)


def batch_for(request: Request, config: RunConfig, world_size: int) -> BatchPlan:
    """Return the batch plan for a world, or say what would divide.

    Raises:
        BatchNotDivisibleError: The global batch does not divide.
        ConfigError: --ds-config states other batch numbers than the world allows.
    """
    if request.ds_report is not None:
        check_world(request.ds_report, world_size)
    return plan_batch(
        global_batch_size=config.batch.global_batch_size,
        micro_batch_size=config.batch.micro_batch_size,
        world_size=world_size,
    )


def resolve_storage(storage: str, *, key: str = "storage") -> str:
    """Return the location that ``key`` names, independent of the working directory.

    Raises:
        ConfigError: A relative path inside a Ray job's unpacked package, which is temporary.
    """
    is_relative = "://" not in storage and not os.path.isabs(os.path.expanduser(storage))
    if is_relative and "working_dir_files" in Path.cwd().parts:
        raise ConfigError(
            problem=f"{key}={storage} is relative to the job's package, which Ray deletes "
            "when the job ends.",
            way_out=f"Set --{key} to s3://bucket/prefix or to an absolute directory that all "
            "nodes share.",
        )
    return absolute_url(storage)


def check_corpus(config: RunConfig, source: CorpusSource) -> None:
    """Stop before the run when the corpus cannot fill one global batch.

    Raises:
        DataError: Both numbers are in the message.
    """
    length = config.data.sequence_length
    if source.vocab_size > config.model.vocab_size:
        raise DataError(
            problem=f"The corpus {source.name} has token ids up to {source.vocab_size - 1}; the "
            f"model knows ids below model.vocab_size={config.model.vocab_size}.",
            way_out=f"Set model.vocab_size to at least {source.vocab_size}.",
        )
    num_samples = source.num_tokens // length
    if num_samples < config.batch.global_batch_size:
        raise DataError(
            problem=f"The corpus {source.name} has {source.num_tokens} tokens = {num_samples} "
            f"sequences of data.sequence_length={length}; one global batch takes "
            f"batch.global_batch_size={config.batch.global_batch_size}.",
            way_out="Use a larger data.source, a shorter data.sequence_length or a smaller "
            "batch.global_batch_size.",
        )


def source_revision() -> str:
    """Return the git revision of the working directory, or a note that there is none."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return "not in a git checkout"
    return found.stdout.strip()
