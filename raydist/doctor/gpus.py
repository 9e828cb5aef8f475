# SPDX-License-Identifier: Apache-2.0
"""Findings about GPUs: what differs between nodes, and what is ill. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from raydist.doctor.facts import NodeFacts
from raydist.doctor.finding import Finding, join_words

GIB = 1 << 30

USED_FRACTION = 0.05
"""More is another process's; what the driver keeps for itself is below."""
MEMORY_SPREAD = 0.02
"""Cards of one model differ by less: with ECC on or off, by 6 %."""

_SLOWEST = "Every step takes as long as the slowest rank."


def examine_gpus(nodes: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """Yield what is wrong or uneven in the GPUs of ``nodes``."""
    for label, facts in nodes.items():
        if facts.gpu_problem:
            yield Finding(
                severity="failure",
                check="GPU driver",
                where=(label,),
                what=f"The GPUs cannot be read: {facts.gpu_problem}.",
                why="A rank there finds no GPU, or hangs in its first CUDA call.",
                what_to_do="Run nvidia-smi there; reload the driver, restart or leave out the "
                "node.",
            )
        yield from _ill(label, facts)
    with_gpus = {label: facts for label, facts in nodes.items() if facts.gpus}
    yield from _counts(nodes, with_gpus)
    yield from _models(with_gpus)
    yield from _peers(with_gpus)


def _ill(label: str, facts: NodeFacts) -> Iterator[Finding]:
    for gpu in facts.gpus:
        name = f"GPU {gpu.index} ({gpu.uuid})"
        if gpu.num_uncorrected_errors:
            yield Finding(
                severity="failure",
                check="GPU memory errors",
                where=(label,),
                what=f"{name} has {gpu.num_uncorrected_errors} uncorrected ECC errors.",
                why="The process that meets the next one is killed.",
                what_to_do="Reset the GPU or restart the node; replace the card when they return.",
            )
        if gpu.slowdowns:
            yield Finding(
                severity="warning",
                check="GPU clocks",
                where=(label,),
                what=f"{name} is slowed down: {join_words(gpu.slowdowns)}.",
                why=_SLOWEST,
                what_to_do="Check its cooling and power supply.",
            )
        used = gpu.memory_used_bytes / max(1, gpu.memory_total_bytes)
        if used > USED_FRACTION and not gpu.has_mig:
            yield Finding(
                severity="warning",
                check="GPU memory",
                where=(label,),
                what=f"{name} has {gpu.memory_used_bytes / GIB:.1f} of "
                f"{gpu.memory_total_bytes / GIB:.1f} GiB in use.",
                why="A rank there has less memory than the plan counts with.",
                what_to_do="End the other process (nvidia-smi names it), or leave out the node.",
            )
        if gpu.compute_mode == "Prohibited":
            yield Finding(
                severity="failure",
                check="GPU compute mode",
                where=(label,),
                what=f"{name} is in compute mode Prohibited.",
                why="No process may use it.",
                what_to_do="Set it with nvidia-smi --compute-mode=DEFAULT.",
            )


def _counts(
    nodes: Mapping[str, NodeFacts], with_gpus: Mapping[str, NodeFacts]
) -> Iterator[Finding]:
    without = tuple(label for label in nodes if label not in with_gpus)
    if with_gpus and without:
        yield Finding(
            severity="note",
            check="GPU count",
            where=without,
            what=f"No GPU here; {len(with_gpus)} other nodes have them.",
            why="GPU ranks are placed on the others only.",
            what_to_do="Nothing, when this is a head node; else check its driver.",
        )
    counts = Counter(len(facts.gpus) for facts in with_gpus.values())
    usual = counts.most_common(1)[0][0] if counts else 0
    for label, facts in with_gpus.items():
        if len(facts.gpus) != usual:
            yield Finding(
                severity="warning",
                check="GPU count",
                where=(label,),
                what=f"{len(facts.gpus)} GPUs here; other nodes have {usual}.",
                why="A GPU may have been lost, and collectives within nodes become uneven.",
                what_to_do="Compare nvidia-smi with lspci there; restart or leave out the node.",
            )


def _models(nodes: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    models: dict[str, list[str]] = {}
    for label, facts in nodes.items():
        for name in dict.fromkeys(gpu.name for gpu in facts.gpus):
            models.setdefault(name, []).append(label)
    if len(models) > 1:
        each = join_words(f"{name} on {join_words(labels)}" for name, labels in models.items())
        usual = max(models.values(), key=len)
        odd = [n for labels in models.values() if labels is not usual for n in labels]
        yield Finding(
            severity="warning",
            check="GPU model",
            where=tuple(dict.fromkeys(odd)),
            what=f"The GPUs are of {len(models)} models: {each}.",
            why=f"{_SLOWEST} The smallest memory sets the micro batch.",
            what_to_do="Choose one with scaling.accelerator_type, or leave nodes out.",
        )
    for name in models:
        sizes = {
            label: min(gpu.memory_total_bytes for gpu in facts.gpus if gpu.name == name)
            for label, facts in nodes.items()
            if any(gpu.name == name for gpu in facts.gpus)
        }
        largest = max(sizes.values())
        small = tuple(n for n, size in sizes.items() if size < largest * (1 - MEMORY_SPREAD))
        if small:
            yield Finding(
                severity="warning",
                check="GPU memory",
                where=small,
                what=f"{name} has {min(sizes.values()) / GIB:.1f} GiB here and "
                f"{largest / GIB:.1f} GiB elsewhere.",
                why="The smallest memory sets the micro batch.",
                what_to_do="Set ECC and MIG alike on all nodes.",
            )


def _peers(nodes: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """Yield pairs that reach each other worse than pairs of the same model elsewhere."""
    with_nvlink = {
        _model(facts)
        for facts in nodes.values()
        if facts.gpu_pairs and all(pair.has_nvlink for pair in facts.gpu_pairs)
    }
    with_access = {
        _model(facts)
        for facts in nodes.values()
        if any(pair.peer_access == "OK" for pair in facts.gpu_pairs)
    }
    for label, facts in nodes.items():
        model = _model(facts)
        closed = [p for p in facts.gpu_pairs if p.peer_access not in (None, "OK")]
        if closed:
            words = join_words(sorted({str(pair.peer_access) for pair in closed}))
            yield Finding(
                severity="warning" if model in with_access else "note",
                check="GPU peer access",
                where=(label,),
                what=f"{len(closed)} of {len(facts.gpu_pairs)} pairs of {model} cannot read each "
                f"other's memory ({words}), such as GPU {closed[0].first} and {closed[0].second}.",
                why="NCCL then goes through host memory within the node, at a part of the speed.",
                what_to_do="Switch off ACS or the IOMMU for these devices, when the model has "
                "peer access at all.",
            )
        unlinked = [p for p in facts.gpu_pairs if p.link is not None and not p.has_nvlink]
        if unlinked and model in with_nvlink:
            yield Finding(
                severity="warning",
                check="NVLink",
                where=(label,),
                what=f"{len(unlinked)} of {len(facts.gpu_pairs)} pairs of {model} have no NVLink, "
                f"such as GPU {unlinked[0].first} and {unlinked[0].second} ({unlinked[0].link}); "
                "on another node all have.",
                why="Collectives within the node run at the speed of PCIe.",
                what_to_do="Check that the fabric manager runs there, and nvidia-smi nvlink "
                "--status.",
            )


def _model(facts: NodeFacts) -> str:
    return facts.gpus[0].name
