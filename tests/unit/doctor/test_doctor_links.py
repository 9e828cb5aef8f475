# SPDX-License-Identifier: Apache-2.0
"""Two rounds of pairs that point at the bad node or link. Pure; nothing is faked."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.doctor import Finding
from raydist.doctor.links import (
    SLOW_FRACTION,
    Pair,
    Wave,
    examine_links,
    first_round,
    pair_suspects,
    second_round,
)

RATE = 1e9


def measure(waves: list[Wave], rate_of: Callable[[Pair], float | None]) -> dict[Pair, float | None]:
    return {pair: rate_of(pair) for wave in waves for pair in wave}


def two_rounds(
    nodes: list[str], rate_of: Callable[[Pair], float | None]
) -> tuple[list[Finding], dict[Pair, float | None]]:
    """Measure as a doctor does, and return its findings and all rates."""
    rates = measure(first_round(nodes), rate_of)
    rates |= measure(second_round(rates), rate_of)
    return examine_links(rates), rates


def names(count: int) -> list[str]:
    return [f"n{number}" for number in range(count)]


def noisy(
    seed: int,
    *,
    bad_nodes: Mapping[str, float | None] = {},
    bad_links: Mapping[frozenset[str], float | None] = {},
) -> Callable[[Pair], float | None]:
    """Return rates within 20 % of ``RATE``, times the least factor of node or link; None cuts."""
    chance = random.Random(seed)

    def rate_of(pair: Pair) -> float | None:
        factors = [bad_nodes.get(node, 1.0) for node in pair]
        factors.append(bad_links.get(frozenset(pair), 1.0))
        known = [factor for factor in factors if factor is not None]
        noise = chance.uniform(0.8, 1.2)
        return None if len(known) < 3 else RATE * min(known) * noise

    return rate_of


@pytest.mark.parametrize("count", range(12))
def test_first_round_measures_every_node_in_waves_without_a_node_twice(count: int) -> None:
    nodes = names(count)
    waves = first_round(nodes)
    for wave in waves:
        busy = [node for pair in wave for node in pair]
        assert len(busy) == len(set(busy))
    measured = {node for wave in waves for pair in wave for node in pair}
    assert measured == (set(nodes) if count > 1 else set())
    assert len(waves) == (0 if count < 2 else 1 if count % 2 == 0 else 3)


def test_second_round_measures_each_suspect_with_a_good_node_it_has_not_met() -> None:
    rates: dict[Pair, float | None] = {("a", "b"): 100.0, ("c", "d"): 100.0, ("e", "f"): 10.0}
    assert second_round(rates) == [(("e", "a"), ("f", "b"))]


def test_second_round_with_few_good_nodes_takes_several_waves() -> None:
    waves = pair_suspects(["c", "d", "e"], ["a"], tried=[("a", "b")])
    assert waves == [(("c", "a"),), (("d", "a"),), (("e", "a"),)]


def test_second_round_without_a_good_partner_is_empty() -> None:
    assert second_round({("a", "b"): None}) == []
    assert pair_suspects(["b"], ["a"], tried=[("b", "a")]) == []


def test_second_round_after_good_rates_is_empty() -> None:
    assert second_round({("a", "b"): 100.0, ("c", "d"): 51.0}) == []


@given(count=st.integers(2, 17), seed=st.integers(0, 10**6))
def test_links_of_healthy_nodes_have_no_finding(count: int, seed: int) -> None:
    findings, rates = two_rounds(names(count), noisy(seed))
    assert findings == []
    assert len(rates) == count // 2 + 2 * (count % 2)


@given(
    count=st.integers(3, 17),
    data=st.data(),
    factor=st.one_of(st.none(), st.floats(0.001, 0.3)),
    seed=st.integers(0, 10**6),
)
def test_one_bad_node_is_named_and_no_other(
    count: int, data: st.DataObject, factor: float | None, seed: int
) -> None:
    nodes = names(count)
    bad = data.draw(st.sampled_from(nodes))
    findings, _ = two_rounds(nodes, noisy(seed, bad_nodes={bad: factor}))
    assert [f.where for f in findings] == [(bad,)]
    assert findings[0].severity == ("failure" if factor is None else "warning")
    assert f"--exclude {bad}" in findings[0].what_to_do


@given(
    count=st.integers(3, 17),
    data=st.data(),
    factor=st.one_of(st.none(), st.floats(0.001, 0.3)),
    seed=st.integers(0, 10**6),
)
def test_one_bad_link_that_is_measured_is_named_and_no_node(
    count: int, data: st.DataObject, factor: float | None, seed: int
) -> None:
    nodes = names(count)
    measured = [pair for wave in first_round(nodes) for pair in wave]
    bad = data.draw(st.sampled_from(measured))
    findings, _ = two_rounds(nodes, noisy(seed, bad_links={frozenset(bad): factor}))
    assert [f.where for f in findings] == [bad]
    assert "it is the link between them" in findings[0].what


@given(count=st.integers(6, 16), data=st.data(), seed=st.integers(0, 10**6))
def test_two_bad_nodes_are_both_named(count: int, data: st.DataObject, seed: int) -> None:
    nodes = names(count)
    bad = data.draw(st.sampled_from(list(itertools.combinations(nodes, 2))))
    findings, _ = two_rounds(nodes, noisy(seed, bad_nodes=dict.fromkeys(bad, 0.1)))
    assert sorted(f.where for f in findings) == [(node,) for node in sorted(bad)]


def test_two_nodes_that_do_not_connect_are_told_as_between_them() -> None:
    findings, _ = two_rounds(["a", "b"], lambda pair: None)
    assert [f.where for f in findings] == [("a", "b")]
    assert findings[0].severity == "failure"
    assert findings[0].what == (
        "Between a and b: they do not reach each other; which of the two is at fault cannot be "
        "told from these pairs."
    )


def test_nodes_of_which_none_connects_are_told_by_pair() -> None:
    findings, _ = two_rounds(names(4), lambda pair: None)
    assert [f.where for f in findings] == [("n0", "n1"), ("n2", "n3")]


@pytest.mark.parametrize(
    ("fraction", "is_told"), [(SLOW_FRACTION, False), (SLOW_FRACTION - 0.01, True)]
)
def test_pair_is_slow_below_half_of_what_others_reach(fraction: float, is_told: bool) -> None:
    rates: dict[Pair, float | None] = {("a", "b"): RATE, ("c", "d"): RATE, ("e", "f"): RATE}
    findings = examine_links(rates | {("g", "h"): RATE * fraction})
    assert [f.where for f in findings] == [("g", "h")] * is_told


def test_rates_are_told_with_their_unit() -> None:
    findings, _ = two_rounds(
        ["a", "b", "c"], lambda pair: 2.5e6 if "c" in pair else 1.25e9
    )  # fmt: skip
    assert findings[0].what == (
        "c moves 2.5 MB/s with a and 2.5 MB/s with b; others usually 1,250 MB/s."
    )
