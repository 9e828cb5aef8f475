# SPDX-License-Identifier: Apache-2.0
"""Findings about software: versions that differ between nodes, drivers, compiled ops. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from raydist.doctor.facts import NodeFacts
from raydist.doctor.finding import Finding, Severity, join_words

STALE_LOCK_S = 600.0
"""Building DeepSpeed's CPU op took 75 s on two cores; ten minutes is no build any more."""

_MIN_DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""Oldest driver of each major version of CUDA.

Source: CUDA Toolkit release notes, "CUDA minor version compatibility"."""

_SAME_CODE = "Ranks that run different code give different numbers, or fail in the middle of a run."
_RAY_WHY = "Ray refuses nodes of another version, and what is sent between processes may not load."
_INSTALL = "Install the same versions on every node, best from one lock file or one image."


def examine_software(nodes: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """Yield what is wrong or uneven in the software of ``nodes``."""
    for name in ("raydist", "ray", "deepspeed", "transformers"):
        why = _RAY_WHY if name == "ray" else _SAME_CODE
        yield from _different(nodes, name, severity="failure", why=why)
    yield from _different_python(nodes)
    yield from _different_torch(nodes)
    yield from _different(nodes, "numpy", severity="note", why=_SAME_CODE, is_shared=True)
    machine = "Ranks on unlike machines may round differently and are built from other wheels."
    yield from _different(nodes, "machine", severity="warning", why=machine, is_shared=True)
    for name in ("kernel", "libc"):
        system = "It rarely matters; it may explain why only some nodes misbehave."
        yield from _different(nodes, name, severity="note", why=system, is_shared=True)
    yield from _different_drivers(nodes)
    yield from _old_drivers(nodes)
    yield from _ops(nodes)


def _different(
    nodes: Mapping[str, NodeFacts],
    name: str,
    *,
    severity: Severity,
    why: str,
    is_shared: bool = False,
    read: Callable[[str], str] = str,
    title: str | None = None,
) -> Iterator[Finding]:
    """Yield one finding when the nodes do not all have one version, naming those that differ.

    Args:
        nodes: By label.
        name: Of the software in the facts.
        severity: Of the finding.
        why: Of the finding.
        is_shared: Whether nodes without the software are left out.
        read: Reduces a version to what is compared.
        title: The software's name for people.
    """
    groups: dict[str, list[str]] = {}
    for label, facts in nodes.items():
        version = facts.versions.get(name)
        if version is None and is_shared:
            continue
        groups.setdefault("none" if version is None else read(version), []).append(label)
    if len(groups) < 2:
        return
    sizes = sorted((len(labels) for labels in groups.values()), reverse=True)
    most = max(groups.values(), key=len)
    has_majority = sizes[0] > sizes[1]
    each = join_words(f"{v} on {join_words(labels)}" for v, labels in groups.items())
    odd = [label for labels in groups.values() if labels is not most for label in labels]
    yield Finding(
        severity=severity,
        check=f"{title or name} version",
        where=tuple(odd if has_majority else [one for labels in groups.values() for one in labels]),
        what=f"{title or name} is {each}."
        + (f" Most nodes, {len(most)} of {sum(sizes)}, agree." if has_majority else ""),
        why=why,
        what_to_do=_INSTALL,
    )


def _different_python(nodes: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    minor = list(
        _different(
            nodes,
            "python",
            severity="failure",
            why=_RAY_WHY,
            read=lambda version: ".".join(version.split(".")[:2]),
            title="Python",
        )
    )
    patch = "Ray warns of it; what is sent between processes still loads."
    yield from minor or _different(nodes, "python", severity="note", why=patch, title="Python")


def _different_torch(nodes: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """Yield differences of torch: its release everywhere, its build among nodes with GPUs."""
    release = list(
        _different(
            nodes,
            "torch",
            severity="failure",
            why=_SAME_CODE,
            read=lambda version: version.partition("+")[0],
        )
    )
    if release:
        yield from release
        return
    with_gpus = {label: facts for label, facts in nodes.items() if facts.gpus}
    build = list(_different(with_gpus, "torch", severity="failure", why=_SAME_CODE))
    head = "A node without GPUs may have a build without CUDA, as long as no GPU rank runs there."
    yield from build or _different(nodes, "torch", severity="note", why=head)
    nccl = "NCCL of different versions may not talk to each other, or hangs."
    yield from _different(with_gpus, "nccl", severity="failure", why=nccl, title="NCCL")


def _different_drivers(nodes: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    why = "Nodes of one job with unlike drivers fail in unlike ways; NCCL is tested with like ones."
    for finding in _different(
        nodes, "driver", severity="warning", why=why, is_shared=True, title="NVIDIA driver"
    ):
        yield Finding(
            severity=finding.severity,
            check="GPU driver",
            where=finding.where,
            what=finding.what,
            why=finding.why,
            what_to_do="Install one driver version on all GPU nodes.",
        )


def _old_drivers(nodes: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    for label, facts in nodes.items():
        driver, cuda = facts.versions.get("driver"), facts.versions.get("cuda")
        if driver is None or cuda is None:
            continue
        least = _MIN_DRIVERS.get(int(cuda.split(".")[0]))
        has = tuple(int(number) for number in re.findall(r"\d+", driver)[:2])
        if least is not None and has < least:
            yield Finding(
                severity="warning",
                check="GPU driver",
                where=(label,),
                what=f"torch is built for CUDA {cuda}, which takes driver {least[0]}.{least[1]} or "
                f"newer; there is {driver}.",
                why="torch then finds no GPU, unless CUDA's forward compatibility is installed.",
                what_to_do="Install a newer driver, or torch for an older CUDA.",
            )


def _ops(nodes: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    for label, facts in nodes.items():
        for path, age_s in facts.ops.locks if facts.ops else ():
            is_stale = age_s > STALE_LOCK_S
            yield Finding(
                severity="warning" if is_stale else "note",
                check="compiled ops",
                where=(label,),
                what=f"There is a {'stale ' if is_stale else ''}lock at {path}, "
                f"{age_s / 60:.0f} minutes old.",
                why="Whoever needs that op waits until the lock is gone: for ever, when the "
                "builder was killed.",
                what_to_do=f"Remove {path} when no build runs there."
                if is_stale
                else "Wait for the build to end.",
            )
    built = {op for facts in nodes.values() if facts.ops for op in facts.ops.built}
    for op in sorted(built):
        without = [n for n, facts in nodes.items() if facts.ops and op not in facts.ops.built]
        if without:
            yield Finding(
                severity="note",
                check="compiled ops",
                where=tuple(without),
                what=f"DeepSpeed's op {op} is built on {len(nodes) - len(without)} of "
                f"{len(nodes)} nodes, and not here.",
                why="It is compiled at the first start there, for a minute or more, while the "
                "other ranks wait.",
                what_to_do="Run python -m raydist.train.environment there once, or in the image.",
            )
