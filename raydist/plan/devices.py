# SPDX-License-Identifier: Apache-2.0
"""Devices a plan can be made for, and the memory each of them has."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from raydist.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """One accelerator, or the host when there is none.

    Fields:
        name: As the table names it; ``cpu`` is the host itself.
        memory_bytes: What the driver reports as the whole, or a rank's share of the host; None
            where it is not known ahead.
    """

    name: str
    memory_bytes: int | None

    @property
    def is_host(self) -> bool:
        """Whether device and host memory are the same memory."""
        return self.name == "cpu"


# What CUDA reports as total, rounded down to 0.1 GiB; always less than the name says.
# Source: "total capacity" in public out-of-memory reports (80 GB cards 79.10 to 79.25 GiB,
# RTX 4090 23.64 GiB: ali-vilab/VGen#104) and the H200 that raydist is tested on (139 GiB).
# L4 is the 22.5 GiB that 24 GB with ECC leaves, less 0.5: not measured here.
_MEMORY_GIB: dict[str, float | None] = {
    "A100-80G": 79.1,
    "A800-80G": 79.1,
    "H100-80G": 79.1,
    "H200-141G": 139.0,
    "L4-24G": 22.0,
    "RTX4090-24G": 23.6,
    "cpu": None,
}

# Ray's accelerator types that say no size but exist in one only (scaling.accelerator_type).
_ALIASES = {
    "A800": "A800-80G",
    "H100": "H100-80G",
    "H200": "H200-141G",
    "L4": "L4-24G",
    "RTX4090": "RTX4090-24G",
}

DEVICES: dict[str, DeviceSpec] = {
    name: DeviceSpec(name=name, memory_bytes=None if gib is None else int(gib * GIB))
    for name, gib in _MEMORY_GIB.items()
}


def get_device(name: str) -> DeviceSpec:
    """Return the device of that name; upper and lower case are the same.

    Raises:
        ConfigError: No such device in the table; names the nearest.
    """
    known = {key.lower(): key for key in DEVICES} | {
        alias.lower(): key for alias, key in _ALIASES.items()
    }
    found = known.get(name.lower())
    if found:
        return DEVICES[found]
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    guess = f"Did you mean {known[near[0]]}? " if near else ""
    raise ConfigError(
        problem=f"No memory size is known for the device {name!r}.",
        way_out=f"{guess}Known devices: {', '.join(DEVICES)}.",
    )
