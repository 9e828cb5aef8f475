# SPDX-License-Identifier: Apache-2.0
"""Names, addresses and host files of a local cluster. Pure; nothing is faked."""

from __future__ import annotations

import ipaddress
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.testing.bed_plan import (
    NETWORKS,
    BedPlan,
    NodePlan,
    bed_name,
    hosts_file,
    owner_of,
    ranks_in,
)

_MAX_PID = 2**22


def _nodes(plan: BedPlan, count: int) -> list[NodePlan]:
    return [plan.node(number) for number in range(1, count + 1)]


@given(pid=st.integers(1, _MAX_PID), number=st.integers(0, 36**2 - 1))
def test_bed_name_gives_its_owner_back(pid: int, number: int) -> None:
    name = bed_name(owner_pid=pid, number=number)
    assert len(name) == 9
    assert owner_of(name) == pid
    assert owner_of(BedPlan(name=name, seed=0).switch) == pid
    assert owner_of(BedPlan(name=name, seed=0).node(17).host) == pid


def test_bed_names_of_one_owner_differ() -> None:
    assert len({bed_name(owner_pid=7, number=n) for n in range(36**2)}) == 36**2


@pytest.mark.parametrize("name", ["", "rd", "rdma00aab", "rdma0-n1", "rd000011", "cni-1234"])
def test_name_of_something_else_has_no_owner(name: str) -> None:
    assert owner_of(name) is None


@given(seed=st.integers(0, 2**24 - 1), ip_version=st.sampled_from([4, 6]))
def test_addresses_are_distinct_and_each_in_its_network(seed: int, ip_version: int) -> None:
    plan = BedPlan(name="rd0000700", seed=seed, ip_version=ip_version)  # type: ignore[arg-type]
    subnets = {network: ipaddress.ip_network(plan.subnet(network)) for network in NETWORKS}
    assert not subnets["management"].overlaps(subnets["data"])
    assert all(subnet.is_private and subnet.version == ip_version for subnet in subnets.values())
    links = [link for node in _nodes(plan, 200) for link in node.links]
    assert len({link.address for link in links}) == 400
    for link in links:
        assert ipaddress.ip_address(link.address) in subnets[link.network]
        assert link.prefix == subnets[link.network].prefixlen


def test_interfaces_of_neighbours_differ_and_names_fit() -> None:
    nodes = _nodes(BedPlan(name="rd0000700", seed=1), 200)
    for a, b in itertools.pairwise(nodes):
        assert not {x.interface for x in a.links} & {x.interface for x in b.links}
    links = [link for node in nodes for link in node.links]
    assert len({link.port for link in links}) == 400
    assert max(len(name) for link in links for name in (link.port, link.interface)) <= 15
    assert all(len({link.interface for link in node.links}) == 2 for node in nodes)


def test_node_without_data_network_has_one_link() -> None:
    node = BedPlan(name="rd0000700", seed=1).node(2, has_data_network=False)
    assert [link.network for link in node.links] == ["management"]
    assert node.find_link("data") is None


def test_only_the_management_network_is_slow() -> None:
    node = BedPlan(name="rd0000700", seed=1, management_rate_mbps=50).node(1)
    assert {link.network: link.rate_mbps for link in node.links} == {"management": 50, "data": None}


@pytest.mark.parametrize(
    ("own_name", "own_line"),
    [
        ("management", "10.64.0.12 rd0000700-n2"),
        ("loopback", "127.0.1.1 rd0000700-n2"),
        ("nothing", None),
    ],
)
def test_hosts_file_names_all_nodes_and_itself_as_told(own_name, own_line: str | None) -> None:
    nodes = _nodes(BedPlan(name="rd0000700", seed=0), 3)
    lines = hosts_file(nodes, nodes[1], own_name=own_name).splitlines()
    assert "127.0.0.1 localhost" in lines
    assert "10.64.0.11 rd0000700-n1" in lines
    assert "10.64.0.13 rd0000700-n3" in lines
    assert [x for x in lines if "n2" in x] == ([own_line] if own_line else [])


def test_ranks_are_those_of_the_last_attempt() -> None:
    said = (
        "run a: 2 x [1 CPU]\n"
        "rank 0: host-n1 (pid 11), CPU, 1 threads, eth0 10.0.0.1 (route)\n"
        "rank 1: host-n2 (pid 12), CPU, 1 threads, eno1 10.0.0.2 (route)\n"
        "rank 1 was lost; restart 1 of 3\n"
        "rank 0: host-n1 (pid 11), CPU, 1 threads, eth0 10.0.0.1 (route)\n"
        "rank 1: host-n3 (pid 99), CPU, 1 threads, mgmt0 10.0.0.3 (route)\n"
    )
    assert ranks_in(said) == {0: ("host-n1", 11), 1: ("host-n3", 99)}
    assert ranks_in("nothing of the kind") == {}
