# SPDX-License-Identifier: Apache-2.0
"""Whether a run fits: parameters, memory by use, and what would help; no torch."""

from raydist.plan.advice import Advice, advise, smallest_world_that_fits
from raydist.plan.devices import DEVICES, DeviceSpec, get_device
from raydist.plan.memory import MemoryPart, MemoryPlan, plan_memory
from raydist.plan.parameters import count_parameters, parameter_shapes
from raydist.plan.report import render_plan

__all__ = [
    "DEVICES",
    "Advice",
    "DeviceSpec",
    "MemoryPart",
    "MemoryPlan",
    "advise",
    "count_parameters",
    "get_device",
    "parameter_shapes",
    "plan_memory",
    "render_plan",
    "smallest_world_that_fits",
]
