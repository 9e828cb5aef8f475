# SPDX-License-Identifier: Apache-2.0
"""The fastest network whose nodes all reach each other. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NoReturn

from raydist.errors import RankUnreachableError
from raydist.network.candidates import CandidateNetwork
from raydist.network.decision import NetworkProbe, Run
from raydist.network.facts import NodeNetwork

_TIE = 1.5  # Measured rates of one link differ by this much between two tries on a busy network.


def best_network(
    run: Run, candidates: Sequence[CandidateNetwork], probes: Mapping[str, NetworkProbe]
) -> tuple[CandidateNetwork, list[tuple[str, str]]]:
    """Return the fastest candidate whose nodes all reach each other, and why not the others.

    Raises:
        RankUnreachableError: There is none.
    """
    rejected, broken, whole = [], [], []
    for candidate in candidates:
        probe = probes.get(candidate.label)
        if probe is not None and probe.unreachable:
            broken.append(probe)
            rejected.append((candidate.label, _pairs(run, probe.unreachable)))
        else:
            whole.append(candidate)
    if not whole:
        refuse_unreachable(run, broken)

    def rank(candidate: CandidateNetwork) -> tuple[float, float, str]:
        measured = _measured(probes, candidate) or 0.0
        return -measured, -(candidate.speed_mbps or 0), candidate.label

    ranked = sorted(whole, key=rank)
    best = next((c for c in ranked if c.carries_cluster), ranked[0])
    for candidate in ranked:
        if _is_faster(candidate, best, probes):
            best = candidate
    rejected += [(c.label, _rate(c, probes) or "no faster") for c in whole if c != best]
    return best, rejected


def _measured(probes: Mapping[str, NetworkProbe], candidate: CandidateNetwork) -> float | None:
    probe = probes.get(candidate.label)
    return probe.slowest_mbps if probe is not None else None


def _is_faster(
    one: CandidateNetwork, other: CandidateNetwork, probes: Mapping[str, NetworkProbe]
) -> bool:
    rates = _measured(probes, one), _measured(probes, other)
    if None in rates:
        rates = one.speed_mbps, other.speed_mbps
    return rates[0] is not None and rates[1] is not None and rates[0] >= _TIE * rates[1]


def _rate(candidate: CandidateNetwork, probes: Mapping[str, NetworkProbe]) -> str | None:
    if (measured := _measured(probes, candidate)) is not None:
        return f"{measured:,.0f} Mb/s measured"
    return f"{candidate.speed_mbps:,} Mb/s stated" if candidate.speed_mbps else None


def why(
    best: CandidateNetwork,
    others: Sequence[CandidateNetwork],
    probes: Mapping[str, NetworkProbe],
    nodes: Sequence[NodeNetwork],
) -> str | None:
    """Return why it is ``best``; None where carrying the cluster's addresses is all of it."""
    whole = [c for c in others if c.label not in probes or not probes[c.label].unreachable]
    slower = [c for c in whole if _is_faster(best, c, probes)]
    rate = _rate(best, probes)
    if slower and rate:
        rates = "; ".join(
            f"{c.label} has {(_rate(c, probes) or '').split()[0]}" for c in slower[:2]
        )
        return f"fastest network all {len(nodes)} nodes share ({best.label}, {rate}; {rates})"
    if best.carries_cluster:
        return None
    which = "a network" if whole else "the one network"
    return f"{which} all {len(nodes)} nodes share ({best.label})"


def refuse_unreachable(run: Run, probes: Sequence[NetworkProbe]) -> NoReturn:
    """Name the node which most of the broken pairs have in common.

    Raises:
        RankUnreachableError: Always.
    """
    problems = []
    for probe in probes:
        counts = Counter(key for pair in probe.unreachable for key in set(pair))
        targets = {target for _, target in probe.unreachable}
        node = min(counts, key=lambda k: (-counts[k], k not in targets, run.names[k]))
        others = {key for pair in probe.unreachable if node in pair for key in pair} - {node}
        from_ = ", ".join(sorted(run.names[key] for key in others))
        rest = sum(node not in pair for pair in probe.unreachable)
        more = f" ({rest} more pairs fail there)" if rest else ""
        problems.append(
            f"Node {run.names[node]} cannot be reached from {from_} over {probe.label}{more}"
        )
    settings = sorted({pin.setting for pin in run.pins.values()})
    undo = f"Undo {', '.join(settings)}" if settings else "Set network.interface to another"
    raise RankUnreachableError(
        problem="; ".join(problems) + ".",
        way_out="Check the link and the firewall of that node, or leave it out with "
        f"scaling.exclude_nodes. {undo}, if another network connects them.",
    )


def _pairs(run: Run, pairs: Sequence[tuple[str, str]]) -> str:
    shown = [f"{run.names[a]} -> {run.names[b]}" for a, b in sorted(pairs)[:3]]
    more = f" and {len(pairs) - 3} more" if len(pairs) > 3 else ""
    return f"no connection {', '.join(shown)}{more}"
