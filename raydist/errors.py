# SPDX-License-Identifier: Apache-2.0
"""Every exception raydist raises, and the kinds of failure they stand for.

An error carries its facts as fields; the message is computed from them. All cross a
process boundary whole: ``__reduce__`` in the root rebuilds the type from its fields.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Any, ClassVar


class FailureKind(enum.Enum):
    """What failed, as far as the answer to it differs. The value is the process exit code."""

    INPUT = 2
    """The request itself: configuration, command line, storage path, capacity, corpus."""
    USER_CODE = 3
    """An exception out of the job's own functions."""
    WORKER_LOST = 4
    """A rank or its node disappeared and the restart budget is spent."""
    STORAGE = 5
    """The store or the checkpoints on it failed during the run."""
    NUMERICS = 6
    """Losses or gradients stayed non-finite past the limit."""
    FENCED = 7
    """Another writer has taken this run over."""
    INTERRUPTED = 130
    """The user stopped it."""

    @property
    def exit_code(self) -> int:
        """Exit status of a process that ends for this reason."""
        return self.value


@dataclass(kw_only=True, eq=False)
class RaydistError(Exception):
    """Root of all errors: what is wrong with its numbers, then the way out.

    Fields:
        problem: One sentence that names the thing and its numbers.
        way_out: What to change, by configuration key.
    """

    kind: ClassVar[FailureKind] = FailureKind.USER_CODE

    problem: str = ""
    way_out: str = ""

    def __str__(self) -> str:
        return f"{self.problem}\n  {self.way_out}" if self.way_out else self.problem

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), {f.name: getattr(self, f.name) for f in fields(self)})


def _rebuild(cls: type[RaydistError], values: dict[str, Any]) -> RaydistError:
    return cls(**values)


@dataclass(kw_only=True, eq=False)
class ConfigError(RaydistError, ValueError):
    """The configuration or the command line asks for something that cannot be."""

    kind: ClassVar[FailureKind] = FailureKind.INPUT


@dataclass(kw_only=True, eq=False)
class BatchNotDivisibleError(ConfigError):
    """global_batch_size is not micro_batch_size x world_size x a whole number."""

    global_batch_size: int
    micro_batch_size: int
    world_size: int

    def __str__(self) -> str:
        unit = self.micro_batch_size * self.world_size
        below, above = nearest_multiples(self.global_batch_size, unit)
        sizes = f"{below} or {above}" if below else f"{above}"
        micro = [
            m
            for m in range(1, self.global_batch_size // self.world_size + 1)
            if self.global_batch_size % (m * self.world_size) == 0
        ]
        text = (
            f"batch.global_batch_size={self.global_batch_size} is not a multiple of "
            f"micro_batch_size={self.micro_batch_size} x world_size={self.world_size} (={unit}).\n"
            f"  Set batch.global_batch_size to {sizes}"
        )
        if micro:
            near = min(micro, key=lambda m: abs(m - self.micro_batch_size))
            text += f", or batch.micro_batch_size to {near}"
        return text + ", or change scaling.workers."


def nearest_multiples(value: int, unit: int) -> tuple[int, int]:
    """Return the multiples of ``unit`` just below and above ``value`` (below may be 0)."""
    below = value // unit * unit
    return below, below + unit


@dataclass(kw_only=True, eq=False)
class CapacityError(ConfigError):
    """More is asked than the cluster can ever have."""

    resource: str
    asked: float
    free: float
    could_scale_to: float

    def __str__(self) -> str:
        return (
            f"The run asks for {self.asked:g} {self.resource}; the cluster has {self.free:g} free "
            f"and could scale to {self.could_scale_to:g}.\n"
            f"  {self.way_out or 'Lower scaling.workers, or add nodes.'}"
        )


@dataclass(kw_only=True, eq=False)
class ClusterError(RaydistError):
    """Ray or the network between the ranks cannot be used."""

    kind: ClassVar[FailureKind] = FailureKind.INPUT


@dataclass(kw_only=True, eq=False)
class RankUnreachableError(ClusterError):
    """A rank cannot reach another; after a restart it may."""

    kind: ClassVar[FailureKind] = FailureKind.WORKER_LOST


@dataclass(kw_only=True, eq=False)
class WorkerLostError(RaydistError):
    """Ranks were lost and the restart budget is spent."""

    kind: ClassVar[FailureKind] = FailureKind.WORKER_LOST


@dataclass(kw_only=True, eq=False)
class RankFailedError(RaydistError):
    """A rank's code raised something that is not raydist's own.

    Fields:
        error: Type of the exception.
        step: Step it was in, None before the first.
        is_collateral: Whether it came out of a collective, as it does when a peer is gone.
        text: The traceback.
    """

    kind: ClassVar[FailureKind] = FailureKind.USER_CODE

    rank: int
    error: str
    step: int | None
    is_collateral: bool
    text: str

    def __str__(self) -> str:
        where = "before its first step" if self.step is None else f"in step {self.step}"
        return f"Rank {self.rank} failed {where}:\n{self.text}"


@dataclass(kw_only=True, eq=False)
class InterruptedRunError(RaydistError):
    """The user interrupted the run."""

    kind: ClassVar[FailureKind] = FailureKind.INTERRUPTED


@dataclass(kw_only=True, eq=False)
class StorageError(RaydistError):
    """A store refused or failed an operation after its retries."""

    kind: ClassVar[FailureKind] = FailureKind.STORAGE


@dataclass(kw_only=True, eq=False)
class ObjectMissingError(StorageError):
    """No object under that key."""

    key: str

    def __str__(self) -> str:
        return f"no object {self.key}"


@dataclass(kw_only=True, eq=False)
class ObjectExistsError(StorageError):
    """A create-if-absent put found the key taken."""

    key: str

    def __str__(self) -> str:
        return f"object {self.key} exists already"


@dataclass(kw_only=True, eq=False)
class CommitUnknownError(StorageError):
    """The store failed while a commit was on its way, so it may or may not come to be."""

    step: int

    def __str__(self) -> str:
        return (
            f"whether step {self.step} is committed is unknown until the journal can be read: "
            f"{self.problem}"
        )


@dataclass(kw_only=True, eq=False)
class StorageUnusableError(StorageError, ValueError):
    """The storage location cannot be written, found before the run starts."""

    kind: ClassVar[FailureKind] = FailureKind.INPUT


@dataclass(kw_only=True, eq=False)
class CheckpointError(RaydistError):
    """A checkpoint cannot be written, read or believed."""

    kind: ClassVar[FailureKind] = FailureKind.STORAGE


@dataclass(kw_only=True, eq=False)
class CheckpointCorruptError(CheckpointError):
    """An object of a committed checkpoint is missing, short or altered."""

    key: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


@dataclass(kw_only=True, eq=False)
class ResumeError(ConfigError):
    """--resume and what lies on storage do not go together."""


@dataclass(kw_only=True, eq=False)
class FencedError(RaydistError):
    """A newer attempt of the same run holds the journal; this writer must stop."""

    kind: ClassVar[FailureKind] = FailureKind.FENCED

    run: str
    attempt: int
    holder: str
    holder_attempt: int

    def __str__(self) -> str:
        return (
            f"Attempt {self.attempt} of run {self.run} was replaced by attempt "
            f"{self.holder_attempt}, held by {self.holder}; nothing more is written."
        )


@dataclass(kw_only=True, eq=False)
class RunAliveError(ConfigError):
    """Another driver is training this run right now."""


@dataclass(kw_only=True, eq=False)
class DataError(RaydistError):
    """The corpus is missing, short, altered or unfit for the run."""

    kind: ClassVar[FailureKind] = FailureKind.INPUT


@dataclass(kw_only=True, eq=False)
class NumericsError(RaydistError):
    """Too many steps in a row had a non-finite loss or gradient."""

    kind: ClassVar[FailureKind] = FailureKind.NUMERICS
