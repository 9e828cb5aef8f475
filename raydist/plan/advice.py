# SPDX-License-Identifier: Apache-2.0
"""How many ranks a run needs, and whether it has to offload; a search over memory plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from raydist.config import RunConfig
from raydist.plan.devices import DeviceSpec
from raydist.plan.memory import plan_memory

Offload = Literal["none", "optimizer", "optimizer and parameters"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What would make a run fit.

    Fields:
        fits: Whether it fits as it is configured.
        smallest_world_size: Fewest ranks with which it fits as configured; None if none does.
        offload: The least that has to leave the device at the asked world size; None where
            even that is not enough.
    """

    fits: bool
    smallest_world_size: int | None
    offload: Offload | None


def smallest_world_that_fits(config: RunConfig, device: DeviceSpec) -> int | None:
    """Return the fewest ranks on which the run fits, or None.

    Only world sizes that split the global batch are tried: those that divide
    global_batch_size / micro_batch_size.

    Raises:
        ConfigError: As ``plan_memory``.
    """
    batch = config.batch
    if batch.global_batch_size % batch.micro_batch_size:
        return None
    for world_size in _divisors(batch.global_batch_size // batch.micro_batch_size):
        if plan_memory(config, world_size=world_size, device=device).fits(device):
            return world_size
    return None


def _divisors(value: int) -> list[int]:
    small = [n for n in range(1, int(value**0.5) + 1) if value % n == 0]
    return sorted({*small, *(value // n for n in small)})


def advise(config: RunConfig, *, world_size: int, device: DeviceSpec) -> Advice:
    """Return whether a run fits, and what would help if not.

    Offloading is tried under zero3 only, from none to all; host memory is not counted, since
    nothing here knows how many ranks share a host.

    Raises:
        ConfigError: As ``plan_memory``.
    """
    least: Offload | None = None
    for offload, candidate in _offload_choices(config):
        if plan_memory(candidate, world_size=world_size, device=device).fits(device):
            least = offload
            break
    return Advice(
        fits=plan_memory(config, world_size=world_size, device=device).fits(device),
        smallest_world_size=smallest_world_that_fits(config, device),
        offload=least,
    )


def _offload_choices(config: RunConfig) -> list[tuple[Offload, RunConfig]]:
    if config.strategy != "zero3":
        return [("none", config)]
    none = replace(config.zero, offload_optimizer="none", offload_parameters="none")
    optimizer = replace(none, offload_optimizer="cpu")
    both = replace(optimizer, offload_parameters="cpu")
    return [
        ("none", replace(config, zero=none)),
        ("optimizer", replace(config, zero=optimizer)),
        ("optimizer and parameters", replace(config, zero=both)),
    ]
