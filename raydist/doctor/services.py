# SPDX-License-Identifier: Apache-2.0
"""Findings about what ranks share: the storage, and collectives with known numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from raydist.doctor.facts import NodeFacts, RankCollectives
from raydist.doctor.finding import Finding, join_words

MB = 1_000_000

SLOW_STORAGE_FRACTION = 0.5
"""Of the middle rate: nodes that measure at the same time share a server and differ by less."""
SLOW_STORAGE_BYTES_PER_S = 100e6
"""A node that reaches this is not called slow: an object of 8 MiB takes 0.1 s, mostly latency."""


def examine_storage(nodes: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """Yield failures of the storage, nodes that do not share it, and slow ones."""
    for label, facts in nodes.items():
        storage = facts.storage
        if storage is None:
            continue
        if storage.failed_step is not None:
            yield Finding(
                severity="failure",
                check="storage",
                where=(label,),
                what=f"Step {storage.failed_step!r} fails at {storage.url}: "
                f"{storage.problem.rstrip('.')}.",
                why="Checkpoints and metrics of the run cannot be written or read from there.",
                what_to_do=storage.way_out or "Choose another --storage, or mend this one.",
            )
        if storage.unseen:
            yield Finding(
                severity="failure",
                check="storage",
                where=(label,),
                what=f"At {storage.url} nothing is seen of what {join_words(storage.unseen)} "
                "wrote: the nodes do not share it.",
                why="Every rank writes its own part of a checkpoint; no node could read all.",
                what_to_do="Set --storage to s3://bucket/prefix, or to a directory that all nodes "
                "mount.",
            )
    yield from _slow_storage(nodes)


def _slow_storage(nodes: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    for way in ("upload", "download"):
        rates = {
            label: rate
            for label, facts in nodes.items()
            if facts.storage and (rate := getattr(facts.storage, f"{way}_bytes_per_s")) is not None
        }
        if len(rates) < 2:
            continue
        usual = median(rates.values())
        limit = min(SLOW_STORAGE_FRACTION * usual, SLOW_STORAGE_BYTES_PER_S)
        for label, rate in rates.items():
            if rate < limit:
                yield Finding(
                    severity="warning",
                    check="storage",
                    where=(label,),
                    what=f"The {way} runs at {rate / MB:.3g} MB/s; the middle of all nodes is "
                    f"{usual / MB:.3g} MB/s.",
                    why="A save is complete when the slowest node's part is written.",
                    what_to_do="Check that node's route to the store and its proxy.",
                )


def examine_collectives(
    ranks: Sequence[RankCollectives], nodes: Mapping[str, NodeFacts]
) -> Iterator[Finding]:
    """Yield collectives that failed or gave wrong numbers, with the ranks and nodes that saw it.

    Args:
        ranks: What each rank saw.
        nodes: By label; a rank names its node by id.
    """
    label_of = {facts.node_id: label for label, facts in nodes.items()}
    wrong: dict[tuple[str, str, int], list[tuple[RankCollectives, str]]] = {}
    for rank in ranks:
        for check in rank.checks:
            if check.is_right is False:
                key = (check.name, check.dtype, check.num_elements)
                wrong.setdefault(key, []).append((rank, check.detail))
    for (name, dtype, num_elements), seen in wrong.items():
        numbers = sorted(rank.rank for rank, _ in seen)
        where = dict.fromkeys(label_of.get(rank.node_id, rank.node_id) for rank, _ in seen)
        first, detail = seen[0]
        yield Finding(
            severity="failure",
            check="collectives",
            where=tuple(where),
            what=f"{name} of {num_elements} {dtype} elements over {first.backend} is wrong on "
            f"{_ranks(numbers)}; rank {first.rank}: {detail}",
            why="Gradients and parameters go through it: the run would fail, or train on wrong "
            "numbers.",
            what_to_do="Run again with NCCL_DEBUG=INFO, or without the node; when it passes then, "
            "have its GPUs and network card checked.",
        )
    skipped = max((rank.num_skipped for rank in ranks), default=0)
    if skipped:
        yield Finding(
            severity="note",
            check="collectives",
            where=(),
            what=f"{skipped} checks of collectives were left out: the time limit was reached.",
            why="What they would have shown is not known.",
            what_to_do="Allow more time, or look at the findings on the network first.",
        )


def _ranks(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = [str(number) for number in numbers[:8]]
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"ranks {', '.join(shown)}{more}"
