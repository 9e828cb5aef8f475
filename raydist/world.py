# SPDX-License-Identifier: Apache-2.0
"""Rank and batch arithmetic: pure, and the only place it is done."""

from __future__ import annotations

from dataclasses import dataclass

from raydist.errors import BatchNotDivisibleError, ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Where one rank stands among the others.

    Fields:
        world_size, rank: Ranks in the run; this rank's index in [0, world_size).
        local_world_size, local_rank: The same on this rank's node.
        num_nodes, node_rank: Nodes that hold ranks; this rank's node's index.
    """

    world_size: int
    rank: int
    local_world_size: int
    local_rank: int
    num_nodes: int
    node_rank: int

    def __post_init__(self) -> None:
        pairs = (
            ("rank", self.rank, self.world_size),
            ("local_rank", self.local_rank, self.local_world_size),
            ("node_rank", self.node_rank, self.num_nodes),
        )
        for name, value, bound in pairs:
            if not 0 <= value < bound:
                raise ConfigError(problem=f"{name}={value} is not in [0, {bound}).")

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """How one global batch is split: micro x accumulation x world_size sequences.

    Fields:
        global_batch_size: Sequences per optimizer step, over all ranks.
        micro_batch_size: Sequences per rank and forward.
        gradient_accumulation_steps: Micro-steps per optimizer step.
        world_size: Data-parallel ranks.
    """

    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    world_size: int

    def positions(self, *, start: int, rank: int) -> list[range]:
        """Return the sample positions of one rank in one step, a range a micro-step.

        The step covers global positions [start, start + global_batch_size); rank r takes the
        r-th contiguous part, so the content of a global batch never depends on the split.
        """
        first = start + rank * (self.global_batch_size // self.world_size)
        return [
            range(first + m * self.micro_batch_size, first + (m + 1) * self.micro_batch_size)
            for m in range(self.gradient_accumulation_steps)
        ]


def plan_batch(*, global_batch_size: int, micro_batch_size: int, world_size: int) -> BatchPlan:
    """Derive gradient accumulation; the global batch is what the user fixed.

    Raises:
        BatchNotDivisibleError: The three numbers admit no whole accumulation; names the
            nearest sizes that do.
    """
    unit = micro_batch_size * world_size
    if global_batch_size % unit:
        raise BatchNotDivisibleError(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            world_size=world_size,
        )
    return BatchPlan(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=global_batch_size // unit,
        world_size=world_size,
    )
