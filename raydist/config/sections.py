# SPDX-License-Identifier: Apache-2.0
"""The sections of a run's configuration; each checks itself, RunConfig checks between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from raydist.errors import ConfigError, nearest_multiples

Strategy = Literal["ddp", "zero3"]
Precision = Literal["fp32", "bf16"]
ResumeMode = Literal["never", "auto", "must"]
Device = Literal["none", "cpu"]
NetworkDebug = Literal["off", "info", "trace"]


def _require_positive(section: str, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(
                problem=f"{section}.{name}={value} is not above 0.",
                way_out=f"Set {section}.{name} to a positive number.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of a decoder-only transformer of the Llama family."""

    architecture: Literal["llama", "qwen2"] = "llama"
    """Family, as transformers names it; qwen2 has biases on q, k and v."""
    vocab_size: int
    """Token ids the model knows."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width inside the gated MLP."""
    num_layers: int
    """Decoder blocks."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key/value heads (grouped-query attention); equal to num_attention_heads for plain."""
    rope_theta: float = 10_000.0
    """Base of the rotary position frequencies."""
    tie_embeddings: bool = False
    """Whether the output projection is the input embedding."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square inside each norm."""
    weights: str | None = None
    """Hugging Face safetensors directory or s3:// prefix to begin from; None takes the seed."""

    def __post_init__(self) -> None:
        _require_positive(
            "model",
            rms_norm_eps=self.rms_norm_eps,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
        )
        for name, value, unit_name, unit in (
            ("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads),
            (
                "num_attention_heads",
                self.num_attention_heads,
                "num_key_value_heads",
                self.num_key_value_heads,
            ),
        ):
            if value % unit:
                raise ConfigError(
                    problem=f"model.{name}={value} is not a multiple of model.{unit_name}={unit}.",
                    way_out=f"Set model.{name} to {max(unit, value // unit * unit)}.",
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """Sequences per optimizer step and how they are split."""

    global_batch_size: int
    """Sequences per optimizer step over all ranks; holds when the world changes."""
    micro_batch_size: int
    """Sequences per rank and forward; gradient accumulation is derived."""

    def __post_init__(self) -> None:
        _require_positive(
            "batch",
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW and its schedule, counted in optimizer steps."""

    learning_rate: float
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay; one-dimensional parameters (norms, biases) have none."""
    max_grad_norm: float | None = 1.0
    """Global gradient norm to clip to; None leaves gradients as they are."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after warm-up."""
    warmup_steps: int = 0
    """Optimizer steps of linear rise to the peak."""
    decay_steps: int | None = None
    """Optimizer step at which the schedule reaches its floor; None is num_steps."""
    min_learning_rate_ratio: float = 0.1
    """Floor of the schedule as a part of the peak."""

    def __post_init__(self) -> None:
        _require_positive(
            "optimizer",
            learning_rate=self.learning_rate,
            eps=self.eps,
            max_grad_norm=self.max_grad_norm,
            decay_steps=self.decay_steps,
        )
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= value < 1:
                raise ConfigError(problem=f"optimizer.{name}={value} is not in [0, 1).")
        if not 0 <= self.min_learning_rate_ratio <= 1:
            raise ConfigError(
                problem=f"optimizer.min_learning_rate_ratio={self.min_learning_rate_ratio} is not "
                "in [0, 1]."
            )
        if not 0 <= self.weight_decay < math.inf or self.warmup_steps < 0:
            raise ConfigError(
                problem=f"optimizer.weight_decay={self.weight_decay} and "
                f"optimizer.warmup_steps={self.warmup_steps} are at least 0."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """What DeepSpeed is told beyond what other sections say."""

    offload_optimizer: Device = "none"
    """Where optimizer state lives: with the rank, or in host memory."""
    offload_parameters: Device = "none"
    """Where parameter partitions live between uses."""
    extra: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed keys that raydist does not model, handed over as they are (--ds-config)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The corpus and how it becomes sequences."""

    source: str
    """`python-stdlib`, a directory of text files, or a prepared corpus (path or s3://)."""
    sequence_length: int
    """Tokens per sequence."""
    tokenizer: Literal["bytes"] = "bytes"
    """`bytes`: ids 0-255 are the bytes, 256 ends a document."""
    shuffle: bool = True
    """Whether each epoch has its own order, a function of (seed, epoch)."""

    def __post_init__(self) -> None:
        if self.sequence_length < 2:
            raise ConfigError(
                problem=f"data.sequence_length={self.sequence_length} leaves nothing to predict.",
                way_out="Set data.sequence_length to at least 2.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When state is saved."""

    every_steps: int | Literal["auto"] | None = 100
    """Optimizer steps between saves; auto: by the measured cost and fault.node_mtbf_hours; None: by
    every_s and at the end only."""
    every_s: float | None = None
    """Seconds between saves; with every_steps too, whichever comes first."""
    when_busy: Literal["wait", "skip"] = "wait"
    """What a save does that is due while the one before is still being written."""
    agree_timeout_s: float = 300.0
    """How long a save waits for the last ranks once rank 0 has written its part; then it is
    abandoned."""
    max_abandoned: int = 3
    """Saves in a row that may fail before the run ends."""
    keep_last: int | None = None
    """Newest checkpoints that stay; None keeps all."""
    keep_every_steps: int | None = None
    """Checkpoints of steps divisible by it stay for ever, beside the last ones."""

    def __post_init__(self) -> None:
        _require_positive(
            "checkpoint",
            every_steps=None if self.every_steps == "auto" else self.every_steps,
            every_s=self.every_s,
            agree_timeout_s=self.agree_timeout_s,
            max_abandoned=self.max_abandoned,
            keep_last=self.keep_last,
            keep_every_steps=self.keep_every_steps,
        )
        if self.keep_every_steps is not None and self.keep_last is None:
            raise ConfigError(
                problem=f"checkpoint.keep_every_steps={self.keep_every_steps} has no effect: all "
                "checkpoints are kept.",
                way_out="Set checkpoint.keep_last too, or leave keep_every_steps out.",
            )
        if self.every_steps == "auto" and self.every_s is not None:
            raise ConfigError(
                problem=f"checkpoint.every_steps=auto chooses the interval that "
                f"checkpoint.every_s={self.every_s:g} sets.",
                way_out="Leave checkpoint.every_s out, or set checkpoint.every_steps to a number "
                "or None.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingConfig:
    """How many ranks, and what each holds."""

    workers: int | None = None
    """Ranks; None takes every GPU of the cluster, or cpu_workers where there is none."""
    cpu_workers: int = 2
    """Ranks when there is no GPU and workers is None."""
    nodes: int | None = None
    """Nodes that each hold the same number of ranks: gpus_per_node, or workers / nodes."""
    gpus_per_node: int | None = None
    """GPUs, and so ranks, on each of the nodes."""
    gpus_per_worker: int = 1
    """GPUs of one rank; one rank drives one GPU, so only 1 is accepted."""
    cpus_per_worker: float | None = None
    """CPUs reserved by each rank; None derives it from the nodes' CPUs."""
    accelerator_type: str | None = None
    """Accelerator that nodes must have, as Ray names it (`H100`, `A100-80G`)."""
    labels: dict[str, str] = field(default_factory=dict)
    """Ray label selector that every node of the run must match (`market-type on-demand`)."""
    exclude_nodes: tuple[str, ...] = ()
    """Nodes to leave out, by name, address or Ray node id."""
    preflight: bool = True
    """Whether nodes are compared and the network between them is tried before step 0."""
    plan_device: str = "cpu"
    """Accelerator that --dry-run plans for (`H100-80G`); `cpu` is the host."""
    start_timeout_s: float = 300.0
    """How long an autoscaler may take to provide the ranks' nodes."""

    def __post_init__(self) -> None:
        _require_positive(
            "scaling",
            workers=self.workers,
            cpu_workers=self.cpu_workers,
            nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            gpus_per_worker=self.gpus_per_worker,
            cpus_per_worker=self.cpus_per_worker,
            start_timeout_s=self.start_timeout_s,
        )
        if self.gpus_per_worker != 1:
            workers = self.workers or self.nodes or 1
            raise ConfigError(
                problem=f"scaling.gpus_per_worker={self.gpus_per_worker} with {workers} workers: "
                "one rank drives exactly one GPU.",
                way_out=f"Use scaling.workers={workers * self.gpus_per_worker} "
                "with scaling.gpus_per_worker=1.",
            )
        if self.nodes is None and self.gpus_per_node is not None:
            raise ConfigError(
                problem=f"scaling.gpus_per_node={self.gpus_per_node} without scaling.nodes.",
                way_out="Set scaling.nodes too, or set scaling.workers alone.",
            )
        if self.nodes and not self.gpus_per_node and (self.workers or 0) % self.nodes:
            below, above = nearest_multiples(self.workers or 0, self.nodes)
            raise ConfigError(
                problem=f"scaling.workers={self.workers} ranks do not spread evenly over "
                f"scaling.nodes={self.nodes}.",
                way_out=f"Set scaling.workers to {f'{below} or ' if below else ''}{above}.",
            )
        if self.nodes and not self.gpus_per_node and not self.workers:
            raise ConfigError(
                problem=f"scaling.nodes={self.nodes} without scaling.gpus_per_node.",
                way_out="Set scaling.gpus_per_node, or scaling.workers for ranks on CPUs.",
            )
        if self.nodes and self.gpus_per_node and self.workers not in (None, self.planned_workers):
            raise ConfigError(
                problem=f"scaling.workers={self.workers} contradicts scaling.nodes={self.nodes} x "
                f"scaling.gpus_per_node={self.gpus_per_node}.",
                way_out=f"Leave scaling.workers out, or set it to {self.planned_workers}.",
            )

    @property
    def planned_workers(self) -> int | None:
        """Ranks that the configuration names, or None where the cluster decides."""
        if self.nodes and self.gpus_per_node:
            return self.nodes * self.gpus_per_node
        return self.workers


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkConfig:
    """How ranks reach each other; None everywhere lets raydist choose."""

    interface: str | None = None
    """Interface on every node whose GLOO_SOCKET_IFNAME is not set; None takes the fastest network
    that all nodes share."""
    node_interfaces: dict[str, str] = field(default_factory=dict)
    """Interface by node (name, address or Ray node id), over `interface`."""
    master_port: int | None = None
    """Port of the rendezvous store on rank 0's node; None lets rank 0 bind a free one."""
    timeout_s: float = 600.0
    """Time limit of one collective, for every process group."""
    reach_timeout_s: float = 5.0
    """How long one node may take to answer another before it counts as unreachable."""
    debug: NetworkDebug = "off"
    """info: NCCL says what it chose; trace: also torch's flight recorder, dumped on a timeout."""

    def __post_init__(self) -> None:
        _require_positive("network", timeout_s=self.timeout_s, reach_timeout_s=self.reach_timeout_s)
        if self.master_port is not None and not 1024 <= self.master_port <= 65535:
            raise ConfigError(
                problem=f"network.master_port={self.master_port} is not in [1024, 65535].",
                way_out="Leave network.master_port out, or name a free port in that range.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultConfig:
    """How much may go wrong before the run ends."""

    max_worker_failures: int = 3
    """Restarts after a lost or failing rank."""
    max_nonfinite_steps: int = 5
    """Steps in a row with a non-finite loss or gradient, each skipped, before the run stops."""
    node_mtbf_hours: float = 3_700.0
    """Mean time between failures of one node, for checkpoint.every_steps=auto. The default is 6.5
    failures in 1,000 node-days (Kokolis et al., arXiv 2410.21680, RSC-1)."""

    def __post_init__(self) -> None:
        _require_positive(
            "fault",
            max_nonfinite_steps=self.max_nonfinite_steps,
            node_mtbf_hours=self.node_mtbf_hours,
        )
        if self.max_worker_failures < 0:
            raise ConfigError(
                problem=f"fault.max_worker_failures={self.max_worker_failures} is below 0."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig:
    """What is said while training; every step is recorded regardless."""

    progress_every_s: float = 5.0
    """Seconds between progress lines in a log; a terminal is refreshed every second."""
    sample_tokens: int = 200
    """Tokens the model writes at the end; 0 writes none."""

    def __post_init__(self) -> None:
        _require_positive("metrics", progress_every_s=self.progress_every_s)
        if self.sample_tokens < 0:
            raise ConfigError(problem=f"metrics.sample_tokens={self.sample_tokens} is below 0.")
