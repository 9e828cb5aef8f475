# SPDX-License-Identifier: Apache-2.0
"""Initial weights: a function of (seed, module name), whatever the strategy and world size."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from raydist.errors import ConfigError


def initialize_weights(
    model: torch.nn.Module,
    *,
    seed: int,
    gather: Callable[[list[torch.nn.Parameter]], AbstractContextManager[object]] | None = None,
) -> None:
    """Initialize every module's own parameters from a stream of its own.

    Args:
        model: A transformers model (its ``_init_weights`` is the rule) or any module whose
            layers have ``reset_parameters``.
        seed: Seed of the run.
        gather: Makes partitioned parameters whole while one module is initialized, so a rank
            never holds more than its part plus one module. None for whole parameters.

    Raises:
        ConfigError: A module has parameters and no rule to initialize them.
    """
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        rule = _rule(model, name, module)
        with gather(own) if gather else nullcontext(), _seeded(seed, name), torch.no_grad():
            rule()


def _rule(model: torch.nn.Module, name: str, module: torch.nn.Module) -> Callable[[], object]:
    of_model = getattr(model, "_init_weights", None)
    if callable(of_model):
        _forget_initialized(module)
        return lambda: of_model(module)
    of_layer = getattr(module, "reset_parameters", None)
    if callable(of_layer):
        return of_layer
    raise ConfigError(
        problem=f"Module {name!r} ({type(module).__name__}) has parameters and no "
        "reset_parameters(), so its weights cannot be made from the seed.",
        way_out="Give the module a reset_parameters() method.",
    )


def _forget_initialized(module: torch.nn.Module) -> None:
    # transformers 5 marks what it has initialized and then leaves it alone.
    for tensor in (module, *module.parameters(recurse=False), *module.buffers(recurse=False)):
        if getattr(tensor, "_is_hf_initialized", False):
            tensor._is_hf_initialized = False  # type: ignore[attr-defined]


@contextmanager
def _seeded(seed: int, name: str) -> Iterator[None]:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        yield
