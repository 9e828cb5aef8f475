# SPDX-License-Identifier: Apache-2.0
"""Interfaces that a site or the configuration has decided. Made up: the nodes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from network_machines import (
    DOCKER,
    MACHINES,
    ONE_HOST,
    P4D,
    TWO_NETWORKS,
    WSL,
    nic,
    node,
    numbered,
    routed,
    two_networks,
)

from raydist.errors import ClusterError, RankUnreachableError
from raydist.network import AS_SET, NetworkProbe, NodeNetwork, choose_network
from raydist.network.presets import nccl_takes


def _with(environments: dict[int, dict[str, str]], count: int = 3) -> list[NodeNetwork]:
    return numbered(count, lambda i: two_networks(i, environment=environments.get(i, {})))


def _gloo(**by_node: str) -> list[NodeNetwork]:
    return _with({int(k[1:]): {"GLOO_SOCKET_IFNAME": v} for k, v in by_node.items()})


def _nccl(**by_node: str) -> list[NodeNetwork]:
    return _with({int(k[1:]): {"NCCL_SOCKET_IFNAME": v} for k, v in by_node.items()})


_SPREAD = {"n1": "eth0", "n2": "eno1", "n3": "eth0"}


@pytest.mark.parametrize(
    ("nodes", "settings", "interfaces", "sources"),
    [
        (
            _gloo(n1="eth0"),
            {},
            ["eth0", "eno1", "eth0"],
            ["kept from GLOO_SOCKET_IFNAME"]
            + ["network of n1's eth0, from GLOO_SOCKET_IFNAME (10.10.0.0/24)"] * 2,
        ),
        (
            _gloo(n1="ens5", n2="enp7s0", n3="ens5"),
            {"interface": "eth0"},
            ["ens5", "enp7s0", "ens5"],
            ["kept from GLOO_SOCKET_IFNAME"] * 3,
        ),
        (
            TWO_NETWORKS,
            {"node_interfaces": _SPREAD},
            ["eth0", "eno1", "eth0"],
            [f"network.node_interfaces[n{i}]" for i in (1, 2, 3)],
        ),
        (
            TWO_NETWORKS,
            {"node_interfaces": {"10.10.0.1": "eth0"}},
            ["eth0", "eno1", "eth0"],
            ["network.node_interfaces[10.10.0.1]"]
            + ["network of n1's eth0, from network.node_interfaces[10.10.0.1] (10.10.0.0/24)"] * 2,
        ),
        (
            TWO_NETWORKS,
            {"node_interfaces": {"id-n2": "eno1"}, "interface": "eth0"},
            ["eth0", "eno1", "eth0"],
            ["network.interface", "network.node_interfaces[id-n2]", "network.interface"],
        ),
        (
            _nccl(n1="=eth0"),
            {},
            ["eth0", "eno1", "eth0"],
            ["follows NCCL_SOCKET_IFNAME"]
            + ["network of n1's eth0, from NCCL_SOCKET_IFNAME (10.10.0.0/24)"] * 2,
        ),
        (_nccl(n1="eth0"), {}, ["eth0", "eno1", "eth0"], None),
        (_nccl(n1="=eth0"), {"backend": "gloo"}, ["ens5", "enp7s0", "ens5"], None),
        (
            _nccl(n1="^ens"),
            {},
            ["eth0", "eno1", "eth0"],
            [
                "carries the cluster address 10.10.0.1; within NCCL_SOCKET_IFNAME=^ens",
                "carries the cluster address 10.10.0.2",
                "carries the cluster address 10.10.0.3",
            ],
        ),
        (_nccl(n1="^docker0,lo", n2="en"), {}, ["ens5", "enp7s0", "ens5"], None),
        (_nccl(n2="eno,eth"), {}, ["eth0", "eno1", "eth0"], None),
        (
            _with({1: {"GLOO_SOCKET_IFNAME": "ens5", "NCCL_SOCKET_IFNAME": "^ens"}}),
            {},
            ["ens5", "enp7s0", "ens5"],
            None,
        ),
        (_gloo(n1=""), {}, ["ens5", "enp7s0", "ens5"], None),
        (P4D, {"interface": "ens64"}, ["ens64", "ens64"], ["network.interface"] * 2),
    ],
    ids=[
        "gloo_on_one", "gloo_before_config", "by_name", "by_address", "by_id_before_interface",
        "nccl_exact", "nccl_name", "nccl_under_gloo", "nccl_exclusion", "nccl_harmless",
        "nccl_list", "gloo_before_nccl", "empty_gloo", "second_card_of_a_subnet",
    ],
)  # fmt: skip
def test_settings_are_kept_and_draw_the_other_nodes(
    nodes: list[NodeNetwork],
    settings: dict[str, Any],
    interfaces: list[str],
    sources: list[str] | None,
) -> None:
    decision = choose_network(nodes, **settings)
    choices = [choice for _, choice in sorted(decision.by_node.items())]
    assert [c.interface for c in choices] == interfaces
    if sources is not None:
        assert [c.source for c in choices] == sources


@pytest.mark.parametrize("wrong", ["^lo,docker0", "=eth0", "eth9", "eth0,eth9", "eth0, ens5"])
def test_gloo_name_that_is_no_interface_is_refused_with_those_that_are(wrong: str) -> None:
    with pytest.raises(ClusterError) as caught:
        choose_network(_gloo(n3=wrong))
    found = str(caught.value)
    assert re.search(r"Node n3: GLOO_SOCKET_IFNAME of the node names '[^']*', which is not", found)
    assert "(it has docker0, ens5, eth0, lo, virbr0)" in found
    assert "Unset GLOO_SOCKET_IFNAME on n3" in found


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"interface": "eth0"}, ["Node n2: network.interface names 'eth0'", "eno1, enp7s0",
                                 "network.node_interfaces"]),
        ({"node_interfaces": {"n2": "ens5"}}, ["Node n2: network.node_interfaces[n2] names"]),
        ({"interface": "lo"}, ["interface lo is loopback, and ranks sit on 3 nodes"]),
        ({"interface": "docker0"}, ["interface docker0 leads to containers on that host only"]),
    ],
)  # fmt: skip
def test_configured_name_that_cannot_hold_is_refused(
    settings: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ClusterError) as caught:
        choose_network(TWO_NETWORKS, **settings)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("card", "trouble"),
    [
        (nic("eth0", "10.0.0.2/24", is_up=False), "is down"),
        (nic("eth0", "fe80::2/64"), "has a link-local address only"),
        (nic("eth0"), "not an interface with an address"),
    ],
)
def test_preset_of_a_card_that_cannot_be_reached_is_refused(card: Any, trouble: str) -> None:
    preset = {"GLOO_SOCKET_IFNAME": "eth0"}
    nodes = [
        node("n1", "10.0.0.1", nic("eth0", "10.0.0.1/24")),
        node("n2", "10.0.0.2", card, environment=preset),
    ]
    with pytest.raises(ClusterError, match=f"Node n2: GLOO_SOCKET_IFNAME.*{trouble}"):
        choose_network(nodes)


@pytest.mark.parametrize("value", ["^e", "=ib0", "ib", "docker0,lo"])
def test_nccl_setting_that_leaves_no_interface_is_refused(value: str) -> None:
    with pytest.raises(ClusterError) as caught:
        choose_network(_nccl(n1=value))
    assert f"Node n1: NCCL_SOCKET_IFNAME={value} of the node leaves no interface" in str(
        caught.value
    )
    assert "Unset NCCL_SOCKET_IFNAME on n1" in str(caught.value)


@pytest.mark.parametrize("value", ["=ib0", "^eth", "docker0"])
def test_nccl_setting_on_one_host_changes_nothing(value: str) -> None:
    one = node(
        "n1",
        "10.0.0.1",
        nic("eth0", "10.0.0.1/24"),
        DOCKER,
        environment={"NCCL_SOCKET_IFNAME": value},
    )
    assert choose_network([one]).by_node["id-n1"].interface == "eth0"


def test_two_ray_nodes_on_one_host_may_use_loopback() -> None:
    decision = choose_network(ONE_HOST, interface="lo")
    assert {c.address for c in decision.by_node.values()} == {"127.0.0.1"}
    assert decision.reason == "all ranks are on one node"


def test_gloo_with_several_interfaces_needs_as_many_everywhere() -> None:
    lists = _gloo(n1="ens5,eth0", n2="enp7s0,eno1", n3="ens5,eth0")
    assert choose_network(lists).by_node["id-n2"].interface == "enp7s0"
    with pytest.raises(ClusterError, match=r"n1: GLOO_SOCKET_IFNAME names 2 .* and n2 has 1"):
        choose_network(_gloo(n1="ens5,eth0"))


def test_setting_for_a_node_without_ranks_is_warned_of() -> None:
    decision = choose_network(TWO_NETWORKS, node_interfaces={"n9": "eth0"})
    assert "network.node_interfaces names n9, which holds no rank" in decision.warnings


def _island(*, has_route: bool) -> list[NodeNetwork]:
    """Return n1, whose stale GLOO_SOCKET_IFNAME names a network of its own, and n2."""
    stale = {"GLOO_SOCKET_IFNAME": "ens6"}
    cards = nic("eth0", "10.0.0.1/24"), nic("ens6", "10.9.0.1/24")
    one = node("n1", "10.0.0.1", *cards, environment=stale)
    two = node("n2", "10.0.0.2", nic("eth0", "10.0.0.2/24"), DOCKER)
    if not has_route:
        return [one, two]
    return [routed(one, two, via="eth0"), routed(two, one, via="eth0")]


def test_stale_variable_on_one_node_is_named_where_nothing_routes_there() -> None:
    with pytest.raises(ClusterError) as caught:
        choose_network(_island(has_route=False))
    assert "Node n1: GLOO_SOCKET_IFNAME of the node names ens6 (10.9.0.1)" in str(caught.value)
    assert "no route between it and n2" in str(caught.value)
    assert "Unset GLOO_SOCKET_IFNAME on n1" in str(caught.value)


def test_interface_reached_by_route_is_kept_with_a_warning() -> None:
    decision = choose_network(_island(has_route=True))
    assert decision.label == AS_SET
    assert [c.address for _, c in sorted(decision.by_node.items())] == ["10.9.0.1", "10.0.0.2"]
    assert decision.by_node["id-n2"].source == "routes to n1's ens6, from GLOO_SOCKET_IFNAME"
    assert any("on no network that all nodes share" in w for w in decision.warnings)


def test_interface_that_does_not_answer_is_named_with_its_setting() -> None:
    probe = NetworkProbe(label=AS_SET, unreachable=(("id-n2", "id-n1"),))
    with pytest.raises(RankUnreachableError, match="Node n1 cannot be reached from n2") as caught:
        choose_network(_island(has_route=True), probes=[probe])
    assert "Undo GLOO_SOCKET_IFNAME of the node" in str(caught.value)


def test_interfaces_set_on_all_nodes_without_a_route_between_them_are_refused() -> None:
    preset = {"GLOO_SOCKET_IFNAME": "ens6"}
    nodes = numbered(
        2,
        lambda i: node(
            f"n{i}",
            f"10.0.0.{i}",
            nic("eth0", f"10.0.0.{i}/24"),
            nic("ens6", f"10.{i}.0.1/24"),
            environment=preset,
            sources={f"10.0.0.{3 - i}": f"10.0.0.{i}"},
        ),
    )
    with pytest.raises(ClusterError, match=r"Node n\d: GLOO_SOCKET_IFNAME .* no route between"):
        choose_network(nodes)


def test_interfaces_set_to_one_address_on_two_machines_are_refused() -> None:
    with pytest.raises(ClusterError, match=r"10\.0\.2\.15 is n2's as well"):
        choose_network(MACHINES["vagrant"], interface="eth0")


def test_preset_of_a_vpn_is_kept() -> None:
    decision = choose_network(MACHINES["laptops"], interface="tun0")
    assert {c.interface for c in decision.by_node.values()} == {"tun0"}
    assert decision.label == "10.8.0.0/24"


def test_preset_on_wsl_is_kept() -> None:
    assert choose_network(WSL, interface="eth0").label == "192.168.1.0/24"


@pytest.mark.parametrize(
    ("value", "name", "takes"),
    [
        ("eth", "eth0", True),
        ("eth", "ens5", False),
        ("eth,ens", "ens5", True),
        ("=eth", "eth0", False),
        ("=eth0,ens5", "ens5", True),
        ("=eth0,ens", "ens5", False),
        ("^docker", "docker0", False),
        ("^docker", "eth0", True),
        ("^docker,eth", "eth0", False),
        ("^=docker0", "docker0", False),
        ("^=docker", "docker0", True),
        ("eth0:1", "eth0", True),
    ],
)
def test_nccl_syntax(value: str, name: str, takes: bool) -> None:
    assert nccl_takes(value, name) is takes
