# SPDX-License-Identifier: Apache-2.0
"""Which node is cut off, from what nodes say and from who answers whom."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.network import Interface, NetworkProbe, NodeNetwork
from raydist.network.faults import blame, network_faults


def _node(number: int, *, data: bool | None = True, kind: str = "physical") -> NodeNetwork:
    """A node with a management and, unless None, a data interface that is up or down."""
    interfaces = [Interface(name="eth0", addresses=(f"10.0.0.{number}/24",))]
    if data is not None:
        addresses = (f"10.1.0.{number}/24", "fe80::1/64")
        interfaces.append(Interface(name="ens5", addresses=addresses, is_up=data, kind=kind))  # type: ignore[arg-type]
    return NodeNetwork(
        node=f"n{number}", node_id=f"id{number}", address=f"10.0.0.{number}",
        interfaces=tuple(interfaces),
    )  # fmt: skip


def test_healthy_nodes_have_no_fault() -> None:
    nodes = [_node(1), _node(2), _node(3)]
    probes = [NetworkProbe(label="10.0.0.0/24"), NetworkProbe(label="10.1.0.0/24")]
    assert network_faults(nodes, probes) == []


def test_a_link_that_is_down_where_most_are_up_is_a_fault_of_its_node() -> None:
    (fault,) = network_faults([_node(1), _node(2), _node(3, data=False)], [])
    assert fault.nodes == ("n3",)
    assert fault.what == "ens5 of n3 is down, and 2 other nodes are up on 10.1.0.0/24"


def test_a_network_that_a_node_does_not_have_is_no_fault() -> None:
    assert network_faults([_node(1), _node(2), _node(3, data=None)], []) == []


def test_a_network_that_is_down_on_most_nodes_is_not_in_use() -> None:
    assert network_faults([_node(1), _node(2, data=False), _node(3, data=False)], []) == []


def test_a_container_bridge_that_is_down_is_no_fault() -> None:
    nodes = [_node(n, data=n != 3, kind="container") for n in (1, 2, 3)]
    assert network_faults(nodes, []) == []


def test_a_node_that_answers_nobody_is_named_with_the_network() -> None:
    silent = tuple(pair for n in (1, 2) for pair in ((f"id{n}", "id3"), ("id3", f"id{n}")))
    probes = [NetworkProbe(label="10.1.0.0/24", unreachable=silent)]
    (fault,) = network_faults([_node(1), _node(2), _node(3)], probes)
    assert fault.nodes == ("n3",)
    assert fault.what.startswith("on 10.1.0.0/24, n1 does not reach n3, n3 does not reach n1")


def test_a_node_that_sends_and_receives_slowly_is_named_with_the_rates() -> None:
    rates = {("id1", "id2"): 9.6, ("id2", "id3"): 9.4, ("id3", "id1"): 7000.0}
    probes = [NetworkProbe(label="10.1.0.0/24", slowest_mbps=9.4, rates_mbps=rates)]
    (fault,) = network_faults([_node(1), _node(2), _node(3)], probes)
    assert fault.nodes == ("n2",)
    assert fault.is_slow
    assert "n1 to n2 10 Mb/s, n2 to n3 9 Mb/s, where others reach 7,000" in fault.what


def test_a_second_ray_node_on_a_host_makes_no_wire_look_slow() -> None:
    rates = {("id1", "id2"): 90.0, ("id2", "id4"): 25_000.0, ("id4", "id1"): 95.0}
    second = replace(_node(2), node_id="id4")
    probes = [NetworkProbe(label="10.0.0.0/24", slowest_mbps=90.0, rates_mbps=rates)]
    assert network_faults([_node(1), _node(2), second], probes) == []


def test_rates_that_differ_as_on_a_busy_machine_are_no_fault() -> None:
    rates = {("id1", "id2"): 3000.0, ("id2", "id3"): 1700.0, ("id3", "id1"): 6900.0}
    probes = [NetworkProbe(label="10.1.0.0/24", slowest_mbps=1700.0, rates_mbps=rates)]
    assert network_faults([_node(1), _node(2), _node(3)], probes) == []


@pytest.mark.parametrize(
    ("pairs", "blamed"),
    [
        ([], []),
        ([("a", "b")], ["a", "b"]),
        ([("a", "b"), ("b", "a")], ["a", "b"]),
        ([("a", "c"), ("b", "c")], ["c"]),
        ([("a", "c"), ("b", "c"), ("d", "e")], ["c", "d", "e"]),
        ([("a", "b"), ("b", "a"), ("c", "d"), ("d", "c")], ["a", "b", "c", "d"]),
    ],
)
def test_blame_is_the_fewest_nodes_that_explain_it(
    pairs: list[tuple[str, str]], blamed: list[str]
) -> None:
    assert blame(pairs) == blamed


@given(st.integers(3, 12), st.data())
def test_blame_of_one_cut_node_among_many_is_exactly_that_node(
    num: int, data: st.DataObject
) -> None:
    nodes = [str(n) for n in range(num)]
    bad = data.draw(st.sampled_from(nodes))
    pairs = [pair for pair in itertools.permutations(nodes, 2) if bad in pair]
    assert blame(data.draw(st.permutations(pairs))) == [bad]
