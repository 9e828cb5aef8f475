# SPDX-License-Identifier: Apache-2.0
"""Which node or link is slow, in two rounds of pairs. Pure: someone else measures the rates.

In the first round nodes are measured in pairs; a slow pair has one bad node, or a bad link. In the
second each suspect is measured again with a node that did well: a node that is slow with that one
too is at fault, else the link is. An odd node out is measured with both nodes of the first pair,
so that a bad partner shows.

Two Ray nodes on one host have no link between them: leave one of them out of the rounds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from raydist.doctor.finding import Finding, join_words

Pair = tuple[str, str]
Wave = tuple[Pair, ...]
"""Pairs that share no node: they are measured at the same time."""

SLOW_FRACTION = 0.5
"""Of the usual rate. Pairs on one healthy network differ less, on a busy machine too."""

MB = 1_000_000


def first_round(nodes: Sequence[str]) -> list[Wave]:
    """Return the pairs to measure first, wave by wave; every node is in one at least."""
    if len(nodes) < 2:
        return []
    pairs = list(zip(nodes[::2], nodes[1::2], strict=False))
    waves: list[Wave] = [tuple(pairs)]
    if len(nodes) % 2:
        first, second = pairs[0]
        waves += [((first, nodes[-1]),), ((second, nodes[-1]),)]
    return waves


def second_round(rates: Mapping[Pair, float | None]) -> list[Wave]:
    """Return the pairs to measure next: each suspect with a good node, wave by wave.

    Args:
        rates: Of the first round in bytes per second; None for a pair that did not connect.
    """
    slow = slow_pairs(rates)
    good = _good_nodes(rates, slow)
    suspects = [node for node in _nodes(slow) if node not in good]
    return pair_suspects(suspects, good, tried=rates)


def pair_suspects(
    suspects: Sequence[str], good: Sequence[str], *, tried: Collection[Pair]
) -> list[Wave]:
    """Return waves that measure each suspect with a good node it was not measured with."""
    waves: list[list[Pair]] = []
    known = {frozenset(pair) for pair in tried}
    for suspect in suspects:
        partners = [node for node in good if frozenset((suspect, node)) not in known]
        if not partners:
            continue
        for wave in waves:
            busy = _nodes(wave)
            free = next((node for node in partners if node not in busy), None)
            if free is not None:
                wave.append((suspect, free))
                break
        else:
            waves.append([(suspect, partners[0])])
    return [tuple(wave) for wave in waves]


def usual_rate(rates: Mapping[Pair, float | None]) -> float:
    """Return the upper quartile of what nodes reach with their best partner, 0.0 without any.

    Not the median: a bad node spoils its partner's first rate too, so that a quarter of bad nodes
    makes half of the rates slow.
    """
    best: dict[str, float] = {}
    for pair, rate in rates.items():
        for node in pair:
            best[node] = max(best.get(node, 0.0), rate or 0.0)
    ordered = sorted(best.values())
    return ordered[math.ceil(0.75 * (len(ordered) - 1))] if ordered else 0.0


def slow_pairs(rates: Mapping[Pair, float | None]) -> list[Pair]:
    """Return the pairs below ``SLOW_FRACTION`` of the usual rate, and those without a rate."""
    least = SLOW_FRACTION * usual_rate(rates)
    return [pair for pair, rate in rates.items() if rate is None or rate < least]


def examine_links(rates: Mapping[Pair, float | None]) -> list[Finding]:
    """Return what the rates of both rounds say: bad nodes, bad links, or between which it is.

    Args:
        rates: In bytes per second by pair; None for a pair that did not connect.
    """
    slow = slow_pairs(rates)
    good = _good_nodes(rates, slow)
    bad = [node for node in _nodes(slow) if node not in good and _is_proven(node, slow, good)]
    findings = [_bad_node(node, rates, [p for p in slow if node in p]) for node in bad]
    for pair in slow:
        if not set(pair) & set(bad):
            findings.append(_bad_pair(pair, rates, is_link=set(pair) <= set(good)))
    return findings


def _is_proven(node: str, slow: Sequence[Pair], good: Collection[str]) -> bool:
    """Whether a node that does well with nobody is slow with two others, one of them good."""
    with_node = [pair for pair in slow if node in pair]
    return len(with_node) > 1 and any(set(pair) & set(good) for pair in with_node)


def _bad_node(node: str, rates: Mapping[Pair, float | None], pairs: Sequence[Pair]) -> Finding:
    others = [b if a == node else a for a, b in pairs]
    is_cut = all(rates[pair] is None for pair in pairs)
    if is_cut:
        what = f"{node} does not reach {join_words(others)}, and they reach others."
    else:
        each = [f"{_rate(rates[p])} with {other}" for p, other in zip(pairs, others, strict=True)]
        what = f"{node} moves {join_words(each)}; others usually {_rate(usual_rate(rates))}."
    return Finding(
        severity="failure" if is_cut else "warning",
        check="network",
        where=(node,),
        what=what,
        why=_CUT if is_cut else _SLOW,
        what_to_do=f"Check {node}'s data interface, its cable, port and MTU, or leave it out with "
        f"--exclude {node}.",
    )


def _bad_pair(pair: Pair, rates: Mapping[Pair, float | None], *, is_link: bool) -> Finding:
    first, second = pair
    rate = rates[pair]
    how = "do not reach each other" if rate is None else f"move {_rate(rate)}"
    than = "" if rate is None else f", others usually {_rate(usual_rate(rates))}"
    told = (
        "with other nodes both do well, so it is the link between them"
        if is_link
        else "which of the two is at fault cannot be told from these pairs"
    )
    return Finding(
        severity="failure" if rate is None else "warning",
        check="network",
        where=pair,
        what=f"Between {first} and {second}: they {how}{than}; {told}.",
        why=_CUT if rate is None else _SLOW,
        what_to_do="Check the route, switch and firewall between them"
        + ("." if is_link else ", and both data interfaces."),
    )


_SLOW = "Every collective goes over all nodes and takes as long as the slowest."
_CUT = "The process group cannot be built, or hangs until its time limit."


def _rate(rate: float | None) -> str:
    if rate is None:
        return "nothing"
    return f"{rate / MB:,.0f} MB/s" if rate >= 100 * MB else f"{rate / MB:.3g} MB/s"


def _nodes(pairs: Collection[Pair]) -> list[str]:
    return list(dict.fromkeys(node for pair in pairs for node in pair))


def _good_nodes(rates: Mapping[Pair, float | None], slow: Collection[Pair]) -> list[str]:
    """Return the nodes that do well with somebody."""
    return _nodes([pair for pair in rates if pair not in slow])
