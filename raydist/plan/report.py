# SPDX-License-Identifier: Apache-2.0
"""A memory plan as a table for people."""

from __future__ import annotations

from raydist.plan.advice import Advice
from raydist.plan.devices import GIB, DeviceSpec
from raydist.plan.memory import MemoryPlan, Phase

_HEADINGS: tuple[tuple[Phase, str], ...] = (
    ("states", "states, kept from step to step"),
    ("always", "also kept"),
    ("backward", "while the backward begins"),
    ("step", "while the optimizer steps"),
)


def render_plan(
    plan: MemoryPlan, *, device: DeviceSpec | None = None, advice: Advice | None = None
) -> str:
    """Return the plan as aligned plain text in GiB (2^30 bytes), states and peak told apart.

    Args:
        plan: What to show.
        device: Adds whether the peak fits.
        advice: Adds what would make it fit; shown with a device only.
    """
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    lines = [
        f"Memory per rank in GiB: {plan.num_parameters:,} parameters, {plan.strategy} on {ranks}",
        _row("", "device", "host"),
    ]
    for phase, heading in _HEADINGS:
        rows = list(dict.fromkeys(p.kind for p in plan.parts if p.phase == phase))
        if not rows:
            continue
        lines.append(f"  {heading}")
        lines += [_row(f"    {kind}", *_cells(plan, phase, kind)) for kind in rows]
    lines += [
        _row("  states", _gib(plan.state_bytes("device")), _gib(plan.state_bytes("host"))),
        _row("  peak", _gib(plan.peak_bytes("device")), _gib(plan.peak_bytes("host"))),
        "  Peak is the states, what is also kept and the larger of the two moments. The states "
        "are exact,",
        f"  the other {_gib(plan.peak_bytes('device') - plan.state_bytes('device'))} GiB of the "
        "device are a model of the step, not a measurement.",
        f"Checkpoint: {_gib(plan.checkpoint_bytes)} GiB, "
        f"{_gib(plan.checkpoint_bytes_per_rank)} GiB by each rank",
    ]
    if device:
        lines.append(_verdict(plan, device))
    if device and advice and not advice.fits:
        lines += _ways_out(plan, advice)
    return "\n".join(lines)


def _cells(plan: MemoryPlan, phase: Phase, kind: str) -> tuple[str, str]:
    sizes = {"device": 0, "host": 0}
    for part in plan.parts:
        if part.phase == phase and part.kind == kind:
            sizes[part.place] += part.size_bytes
    return (
        _gib(sizes["device"]) if sizes["device"] else "",
        _gib(sizes["host"]) if sizes["host"] else "",
    )


def _row(label: str, device: str, host: str) -> str:
    return f"{label:<34}{device:>12}{host:>12}".rstrip()


def _gib(size_bytes: int) -> str:
    """Return bytes in GiB; a size that would read as 0.00 keeps three digits."""
    gib = size_bytes / GIB
    return f"{gib:.2f}" if gib >= 0.01 or not size_bytes else f"{gib:.1e}"


def _verdict(plan: MemoryPlan, device: DeviceSpec) -> str:
    if device.memory_bytes is None:
        return f"{device.name}: memory size not known, so nothing is compared."
    word = "Fits" if plan.fits(device) else "Does not fit"
    return f"{word} on {device.name}, which has {_gib(device.memory_bytes)} GiB."


def _ways_out(plan: MemoryPlan, advice: Advice) -> list[str]:
    lines: list[str] = []
    if plan.strategy == "ddp":
        lines.append("  strategy=zero3 spreads the states over the ranks.")
    if advice.smallest_world_size:
        lines.append(f"  It fits from scaling.workers={advice.smallest_world_size}.")
    if advice.offload == "optimizer":
        lines.append("  It fits with zero.offload_optimizer=cpu.")
    elif advice.offload:
        lines.append("  It fits with zero.offload_optimizer=cpu and zero.offload_parameters=cpu.")
    return lines or ["  Lower batch.micro_batch_size or data.sequence_length."]
