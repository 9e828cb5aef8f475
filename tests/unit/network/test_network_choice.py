# SPDX-License-Identifier: Apache-2.0
"""Which network the ranks talk over. Made up: the nodes' addresses and the measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from network_machines import (
    BONDS,
    DOCKER,
    DUAL_STACK,
    GCP_A3,
    MACHINES,
    ONE_HOST,
    P4D,
    TAILNET,
    TWO_NETWORKS,
    VAGRANT,
    VIRBR,
    nic,
    node,
    numbered,
    two_networks,
)

from raydist.errors import ClusterError, RankUnreachableError
from raydist.network import (
    NetworkDecision,
    NetworkProbe,
    NodeNetwork,
    candidate_networks,
    choose_network,
)


def _interfaces(decision: NetworkDecision) -> list[str]:
    return [choice.interface for _, choice in sorted(decision.by_node.items())]


def _addresses(decision: NetworkDecision) -> list[str]:
    return [choice.address for _, choice in sorted(decision.by_node.items())]


def _sources(decision: NetworkDecision) -> list[str]:
    return [choice.source for _, choice in sorted(decision.by_node.items())]


@pytest.mark.parametrize(
    ("machines", "interfaces", "addresses"),
    [
        ("p4d", ["ens32", "ens32"], ["10.0.0.1", "10.0.0.2"]),
        ("p5", ["enp71s0", "enp71s0"], ["10.0.1.7", "10.0.2.7"]),
        ("gcp_a3", ["eth0", "eth0"], ["10.0.0.1", "10.0.0.2"]),
        ("azure_nd", ["eth0", "eth0"], ["10.0.0.1", "10.0.0.2"]),
        ("bonds", ["bond1", "bond1", "bond1"], ["10.30.0.1", "10.30.0.2", "10.30.0.3"]),
        ("pod", ["eth0"] * 3, ["10.244.1.5", "10.244.2.5", "10.244.3.5"]),
        ("host_network", ["ens5", "ens5"], ["10.0.0.1", "10.0.0.2"]),
        ("wsl", ["eth0", "eth0"], ["192.168.1.1", "192.168.1.2"]),
        ("laptops", ["wlp2s0", "wlp2s0"], ["192.168.1.1", "192.168.1.2"]),
        ("wireless", ["wlp2s0", "wlp2s0"], ["10.0.0.1", "10.0.0.2"]),
        ("unlike_names", ["ens5", "eno1"], ["10.0.0.1", "10.0.0.2"]),
        ("six", ["eth0", "eth0"], ["2001:db8::1", "2001:db8::2"]),
        ("dual_stack", ["eth0", "eth0"], ["10.0.0.1", "10.0.0.2"]),
        ("tailnet", ["tailscale0", "tailscale0"], ["100.64.0.1", "100.64.0.2"]),
        ("proxmox", ["vmbr0", "vmbr0"], ["10.0.0.1", "10.0.0.2"]),
        ("vagrant", ["eth1", "eth1"], ["192.168.56.1", "192.168.56.2"]),
        ("two_networks", ["ens5", "enp7s0", "ens5"], ["10.20.0.1", "10.20.0.2", "10.20.0.3"]),
        ("one_host", ["eth0", "eth0"], ["10.0.0.1", "10.0.0.1"]),
    ],
)
def test_choice_on_real_machines(
    machines: str, interfaces: list[str], addresses: list[str]
) -> None:
    decision = choose_network(MACHINES[machines])
    assert _interfaces(decision) == interfaces
    assert _addresses(decision) == addresses


def test_table_has_every_machine() -> None:
    marks = test_choice_on_real_machines.pytestmark  # pyright: ignore
    assert {row[0] for row in marks[0].args[1]} == set(MACHINES)


@pytest.mark.parametrize(
    ("nodes", "labels"),
    [
        (TWO_NETWORKS, ["10.10.0.0/24", "10.20.0.0/24"]),
        (BONDS, ["10.0.0.0/24", "10.20.0.0/24", "10.30.0.0/24"]),
        (DUAL_STACK, ["10.0.0.0/24"]),
        (P4D, ["10.0.0.0/20"]),
        (TAILNET, ["the cluster's addresses"]),
        (VAGRANT, ["192.168.56.0/24"]),
        (GCP_A3, ["the cluster's addresses", *(f"eth{k} (routed)" for k in range(1, 9))]),
    ],
)
def test_candidates_are_the_networks_that_all_nodes_share(
    nodes: Sequence[NodeNetwork], labels: list[str]
) -> None:
    assert [c.label for c in candidate_networks(nodes)] == labels


def test_candidate_carries_addresses_interfaces_and_the_lowest_stated_speed() -> None:
    slow = two_networks(2)
    slow = replace(slow, interfaces=tuple(replace(i, speed_mbps=25_000) for i in slow.interfaces))
    data = candidate_networks([two_networks(1), slow])[1]
    assert data.addresses == {"id-n1": "10.20.0.1", "id-n2": "10.20.0.2"}
    assert data.interfaces == {"id-n1": "ens5", "id-n2": "enp7s0"}
    assert data.speed_mbps == 25_000
    assert not data.carries_cluster


@pytest.mark.parametrize(
    ("cluster", "labels"),
    [
        ("10.10.0.{}", ["10.10.0.0/24", "10.20.0.0/24"]),
        ("fd00:10::{}", ["fd00:10::/64", "fd00:20::/64"]),
    ],
)
def test_candidate_with_both_families_takes_that_of_the_cluster(
    cluster: str, labels: list[str]
) -> None:
    nodes = numbered(
        2,
        lambda i: node(
            f"n{i}",
            cluster.format(i),
            nic("eth0", f"10.10.0.{i}/24", f"fd00:10::{i}/64"),
            nic("eth1", f"10.20.0.{i}/24", f"fd00:20::{i}/64"),
        ),
    )
    assert [c.label for c in candidate_networks(nodes)] == labels


def test_address_that_every_node_answers_to_is_no_network() -> None:
    nodes = numbered(
        2,
        lambda i: node(
            f"n{i}", f"10.0.0.{i}", nic("eth0", f"10.0.0.{i}/24"), nic("dummy0", "10.99.0.1/32")
        ),
    )
    decision = choose_network(nodes)
    assert (decision.label, decision.rejected) == ("10.0.0.0/24", ())


def test_candidate_states_no_speed_where_one_node_has_none_to_believe() -> None:
    nodes = [two_networks(1), two_networks(2, data_kind="virtual")]
    assert [c.speed_mbps for c in candidate_networks(nodes)] == [1000, None]


def test_network_that_one_node_lacks_is_left_and_said() -> None:
    alone = node("n3", "10.10.0.3", nic("eth0", "10.10.0.3/24", mbps=1000))
    decision = choose_network([two_networks(1), two_networks(2), alone])
    assert _interfaces(decision) == ["eth0", "eno1", "eth0"]
    assert _sources(decision)[2] == "carries the cluster address 10.10.0.3"
    assert ("10.20.0.0/24", "n3 is not on it") in decision.rejected


def test_network_where_two_machines_have_one_address_is_left_and_said() -> None:
    rejected = dict(choose_network(VAGRANT).rejected)
    assert rejected == {"10.0.2.0/24": "n1 and n2 both have 10.0.2.15 there"}


@pytest.mark.parametrize(
    ("machines", "source"),
    [
        ("pod", "carries the cluster address 10.244.1.5"),
        ("tailnet", "carries the cluster address 100.64.0.1; a VPN, but the cluster's way to "
         "this node"),
        ("proxmox", "carries the cluster address 10.0.0.1; a bridge"),
        ("one_host", "one node"),
        ("two_networks", "fastest network all 3 nodes share (10.20.0.0/24, 100,000 Mb/s stated; "
         "10.10.0.0/24 has 1,000)"),
    ],
)  # fmt: skip
def test_source_says_why(machines: str, source: str) -> None:
    assert _sources(choose_network(MACHINES[machines]))[0] == source


def _probes(**mbps: float) -> list[NetworkProbe]:
    labels = {"management": "10.10.0.0/24", "data": "10.20.0.0/24"}
    return [NetworkProbe(label=labels[key], slowest_mbps=value) for key, value in mbps.items()]


@pytest.mark.parametrize(
    ("probes", "label"),
    [
        (_probes(management=96, data=9400), "10.20.0.0/24"),
        (_probes(management=9400, data=96), "10.10.0.0/24"),
        (_probes(management=1000, data=1490), "10.10.0.0/24"),
        (_probes(management=1000, data=1500), "10.20.0.0/24"),
        (_probes(management=1000), "10.20.0.0/24"),
        ([], "10.20.0.0/24"),
    ],
    ids=["data", "management", "tie", "just_faster", "one_measured_so_stated", "stated"],
)
def test_fastest_is_as_measured_before_as_stated(probes: list[NetworkProbe], label: str) -> None:
    assert choose_network(TWO_NETWORKS, probes=probes).label == label


def test_source_shows_what_was_measured() -> None:
    decision = choose_network(TWO_NETWORKS, probes=_probes(management=96, data=9400))
    expected = (
        "fastest network all 3 nodes share (10.20.0.0/24, 9,400 Mb/s measured; 10.10.0.0/24 has 96)"
    )
    assert _sources(decision) == [expected] * 3
    assert decision.reason == expected
    assert ("10.10.0.0/24", "96 Mb/s measured") in decision.rejected


def test_network_with_a_cut_link_is_left_for_one_that_connects_all() -> None:
    cut = NetworkProbe(label="10.20.0.0/24", unreachable=(("id-n1", "id-n2"),), slowest_mbps=9400.0)
    decision = choose_network(TWO_NETWORKS, probes=[cut, *_probes(management=96)])
    assert decision.label == "10.10.0.0/24"
    assert _sources(decision)[0] == "carries the cluster address 10.10.0.1"
    assert ("10.20.0.0/24", "no connection n1 -> n2") in decision.rejected


@pytest.mark.parametrize(
    ("pairs", "parts"),
    [
        ([("n1", "n2")], ["Node n2 cannot be reached from n1 over 10.10.0.0/24"]),
        (
            [("n1", "n3"), ("n2", "n3"), ("n3", "n1"), ("n3", "n2")],
            ["Node n3 cannot be reached from n1, n2 over 10.10.0.0/24"],
        ),
    ],
)
def test_nodes_that_no_network_connects_are_named(
    pairs: list[tuple[str, str]], parts: list[str]
) -> None:
    unreachable = tuple((f"id-{a}", f"id-{b}") for a, b in pairs)
    probes = [
        NetworkProbe(label=label, unreachable=unreachable)
        for label in ("10.10.0.0/24", "10.20.0.0/24")
    ]
    with pytest.raises(RankUnreachableError) as caught:
        choose_network(TWO_NETWORKS, probes=probes)
    for part in [*parts, "over 10.20.0.0/24", "scaling.exclude_nodes"]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "parts"),
    [
        (
            [node("n1", "10.9.9.9", nic("eth0", "10.0.0.1/24")), node("n2", "10.0.1.2")],
            ["Node n1: no interface has the node's address 10.9.9.9 (it has eth0, lo)",
             "--node-ip-address"],
        ),
        (
            [node("n1", "127.0.0.1"), node("n2", "10.0.0.2", nic("eth0", "10.0.0.2/24"))],
            ["Node n1: interface lo, which has the node's address 127.0.0.1, is loopback, and "
             "ranks sit on 2 nodes"],
        ),
        (
            numbered(2, lambda i: node(f"n{i}", "::1")),
            ["n1", "is loopback, and ranks sit on 2 nodes"],
        ),
        (
            numbered(2, lambda i: node(f"n{i}", "172.17.0.1", DOCKER)),
            ["interface docker0", "leads to containers on that host only"],
        ),
        (
            numbered(2, lambda i: node(f"n{i}", f"10.0.0.{i}",
                                       nic("eth0", f"10.0.0.{i}/24", is_up=i == 1))),
            ["Node n2: interface eth0", "is down"],
        ),
        (
            numbered(2, lambda i: node(f"n{i}", "192.168.122.1", VIRBR)),
            ["share no network", "n1 and n2 both have 192.168.122.1", "network.node_interfaces"],
        ),
        (
            [node("n1", "head.cluster.local", nic("eth0", "10.0.0.1/24")), node("n2", "10.1.0.2")],
            ["no interface has the node's address head.cluster.local"],
        ),
    ],
    ids=["vanished", "loopback", "loopback_six", "docker", "down", "virbr", "known_by_name"],
)  # fmt: skip
def test_nodes_that_share_nothing_are_refused_with_the_cause(
    nodes: list[NodeNetwork], parts: list[str]
) -> None:
    with pytest.raises(ClusterError) as caught:
        choose_network(nodes)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "10.0.0.1"])
def test_one_node_may_talk_over_anything(address: str) -> None:
    one = node("n1", address, nic("eth0", "10.0.0.1/24"), resolves_to=("127.0.1.1",))
    decision = choose_network([one])
    assert _addresses(decision) == [address]
    assert _sources(decision) == ["one node"]
    assert decision.warnings == ()


def test_one_node_whose_address_vanished_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"no interface has the node's address 10\.9\.9\.9"):
        choose_network([node("n1", "10.9.9.9", nic("eth0", "10.0.0.1/24"))])


def test_nodes_of_one_name_are_told_apart_by_address() -> None:
    nodes = [
        node("vm", f"10.0.0.{i}", nic("eth0", f"10.0.0.{i}/24"), node_id=f"id-{i}") for i in (1, 2)
    ]
    probe = NetworkProbe(label="10.0.0.0/24", unreachable=(("id-1", "id-2"),))
    with pytest.raises(RankUnreachableError, match=r"vm \(10\.0\.0\.2\) cannot be reached from vm"):
        choose_network(nodes, probes=[probe])


def _changed(**fields: object) -> list[NodeNetwork]:
    first, second = ONE_HOST[0], node("n2", "10.0.0.2", nic("eth0", "10.0.0.2/24", mbps=25_000))
    cards = tuple(replace(i, speed_mbps=25_000) for i in first.interfaces)
    first = replace(first, interfaces=cards)
    of_node = {k: v for k, v in fields.items() if k in {"resolves_to", "rdma"}}
    of_card = {k: v for k, v in fields.items() if k not in of_node}
    eth0 = replace(second.interfaces[1], **of_card)  # type: ignore[arg-type]
    return [first, replace(second, interfaces=(second.interfaces[0], eth0), **of_node)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"mtu": 9001}, "MTU differs on the chosen network: n2 has 9001, n1 1500"),
        ({"speed_mbps": 1000}, "Stated speed differs on the chosen network: n1 has 25000, n2 1000"),
        ({"resolves_to": ("127.0.1.1",)}, "n2: the host name resolves to loopback"),
    ],
)
def test_unequal_nodes_are_warned_of(changes: Mapping[str, object], warning: str) -> None:
    assert choose_network(_changed()).warnings == ()
    assert choose_network(_changed(speed_mbps=1000, kind="virtual")).warnings == ()
    assert [w[: len(warning)] for w in choose_network(_changed(**changes)).warnings] == [warning]
