# SPDX-License-Identifier: Apache-2.0
"""Job: what a job script supplies. No torch at import: the driver only passes it on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raydist.config import RunConfig

if TYPE_CHECKING:
    import torch

Batch = Mapping[str, "torch.Tensor"]
"""`tokens`: int64 [micro_batch, sequence] on the rank's device."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, its loss, and the recipes it is meant to run with.

    The functions are shipped to every rank by value: they use their arguments and their own
    imports, never module globals.

    Fields:
        recipes: Functions that return a full RunConfig; the first is the default.
        build_model: Returns the module; called on every rank, with parameters created
            partitioned under ZeRO-3. Weights are then initialized from the run's seed, module
            by module, by the model's own rule, so its own initialization is not relied on.
        loss_fn: Returns the mean loss of one micro batch, a scalar.
        sample: Returns text to show at the end. All ranks call it, with the same result.
    """

    recipes: Sequence[Callable[[], RunConfig]]
    build_model: Callable[[RunConfig], torch.nn.Module]
    loss_fn: Callable[[torch.nn.Module, Batch], torch.Tensor]
    sample: Callable[[torch.nn.Module, RunConfig], str] | None = None

    def __post_init__(self) -> None:
        names = self.recipe_names
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a Job needs recipes with distinct names, not {list(names)}")

    @property
    def recipe_names(self) -> tuple[str, ...]:
        """Names of the recipes, the default first."""
        return tuple(_name(recipe) for recipe in self.recipes)


def _name(recipe: Any) -> str:
    return recipe.__name__
