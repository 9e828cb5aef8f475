# SPDX-License-Identifier: Apache-2.0
"""RunConfig: the whole of a run, what of it changes the mathematics, and its JSON form."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

from raydist.config.sections import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    FaultConfig,
    MetricsConfig,
    ModelConfig,
    NetworkConfig,
    OptimizerConfig,
    Precision,
    ResumeMode,
    ScalingConfig,
    Strategy,
    ZeroConfig,
)
from raydist.errors import ConfigError

_ADDED = {"model.rms_norm_eps": 1e-6, "model.weights": None}
"""Keys of the mathematics that came after the first release, and what held before them."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One training run. World size is discovered, never part of it."""

    name: str
    """Identity of the run on storage: the same name resumes."""
    num_steps: int
    """Optimizer steps in all."""
    seed: int = 0
    """Seed of initial weights, data order and each rank's random state."""
    strategy: Strategy = "zero3"
    """How state is spread over ranks."""
    precision: Precision = "bf16"
    """Arithmetic of forward and backward; master weights are always fp32."""
    activation_checkpointing: bool = False
    """Whether each block keeps its input only and is computed again in the backward."""
    resume: ResumeMode = "auto"
    """never: start only where no checkpoint is; auto: go on if there is one; must: or fail."""
    storage: str = "~/raydist-runs"
    """Directory or s3://bucket/prefix that holds runs; shared by all nodes."""
    model: ModelConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    data: DataConfig
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                problem=f"name={self.name!r} cannot be a folder on every store.",
                way_out="Use 1 to 100 letters, digits, '.', '_' or '-', starting with a letter "
                "or digit.",
            )
        if self.name == "corpora":
            raise ConfigError(
                problem="name=corpora is the folder of prepared corpora.",
                way_out="Choose another --name.",
            )
        if self.seed < 0:
            raise ConfigError(
                problem=f"seed={self.seed} is below 0.", way_out="Set seed to 0 or more."
            )
        if self.num_steps < 1:
            raise ConfigError(
                problem=f"num_steps={self.num_steps} plans no optimizer step.",
                way_out="Set num_steps to at least 1.",
            )
        if self.optimizer.warmup_steps > self.decay_steps:
            raise ConfigError(
                problem=f"optimizer.warmup_steps={self.optimizer.warmup_steps} is longer than the "
                f"schedule of {self.decay_steps} steps.",
                way_out="Lower optimizer.warmup_steps, or raise num_steps.",
            )
        vocabulary = 257 if self.data.tokenizer == "bytes" else 0
        if self.model.vocab_size < vocabulary:
            raise ConfigError(
                problem=f"model.vocab_size={self.model.vocab_size} is smaller than the "
                f"{vocabulary} ids of data.tokenizer={self.data.tokenizer}.",
                way_out=f"Set model.vocab_size to at least {vocabulary}.",
            )
        if self.strategy != "zero3" and (
            self.zero.extra
            or self.zero.offload_optimizer != "none"
            or self.zero.offload_parameters != "none"
        ):
            raise ConfigError(
                problem=f"strategy={self.strategy} takes nothing from the zero section.",
                way_out="Set strategy to zero3, or leave the zero section as it is.",
            )

    @property
    def run_url(self) -> str:
        """Where this run lies on storage."""
        return f"{self.storage.rstrip('/')}/{self.name}"

    @property
    def decay_steps(self) -> int:
        """Optimizer step at which the schedule reaches its floor."""
        return self.optimizer.decay_steps or self.num_steps

    @property
    def planned_tokens(self) -> int:
        """Tokens the run will have seen at its end."""
        return self.num_steps * self.batch.global_batch_size * self.data.sequence_length


def to_json_dict(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as plain JSON types, sections nested."""
    return dataclasses.asdict(config)


def mathematics(config: RunConfig) -> dict[str, Any]:
    """Return, flat by dotted key, everything that two resumes of one run must share.

    How the work is spread (strategy, micro batch, workers) is not among it.
    """
    sections = {
        "seed": config.seed,
        "precision": config.precision,
        "model": dataclasses.asdict(config.model),
        "batch": {"global_batch_size": config.batch.global_batch_size},
        "optimizer": dataclasses.asdict(config.optimizer) | {"decay_steps": config.decay_steps},
        "data": dataclasses.asdict(config.data),
    }
    return dict(_flatten(sections))


def _flatten(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            flat += _flatten(value, f"{prefix}{key}.")
        else:
            flat.append((prefix + key, value))
    return flat


def config_hash(config: RunConfig) -> str:
    """Return a short hash of ``mathematics(config)``, equal to an earlier raydist's."""
    told = {k: v for k, v in mathematics(config).items() if k not in _ADDED or v != _ADDED[k]}
    text = json.dumps(told, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def diff_mathematics(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return {dotted key: (old value, new value)} for every key whose value differs.

    A key that an earlier raydist did not know has there the value that held before it.
    """
    keys = sorted(old.keys() | new.keys())
    pairs = {k: (old.get(k, _ADDED.get(k)), new.get(k, _ADDED.get(k))) for k in keys}
    return {k: pair for k, pair in pairs.items() if pair[0] != pair[1]}
