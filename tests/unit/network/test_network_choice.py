# SPDX-License-Identifier: Apache-2.0
"""Which interface a rank talks over. Made up: the nodes' interfaces, but for one test."""

from __future__ import annotations

import re
from typing import Any

import pytest

from raydist.errors import ClusterError
from raydist.network import (
    Interface,
    NetworkChoice,
    choose_interface,
    list_interfaces,
    network_environment,
)

_LO = Interface(name="lo", addresses=("127.0.0.1", "::1"))
_ETH0 = Interface(name="eth0", addresses=("10.0.0.5", "fe80::1"))
_IB0 = Interface(name="ib0", addresses=("192.168.7.5",))
_DOCKER = Interface(name="docker0", addresses=("172.17.0.1",))
_SIX = Interface(name="eth6", addresses=("fe80::2", "2001:db8::5"))
_WSL_LO = Interface(name="lo", addresses=("127.0.0.1", "10.255.255.254"))
_NODE = [_LO, _DOCKER, _ETH0, _IB0]


def _choose(interfaces: list[Interface], **changes: Any) -> NetworkChoice:
    arguments: dict[str, Any] = {
        "node": "node-3",
        "node_address": "10.0.0.5",
        "num_nodes": 2,
        "environment": {},
        "override": None,
    }
    return choose_interface(interfaces, **(arguments | changes))


@pytest.mark.parametrize(
    ("interfaces", "changes", "interface", "address", "reason"),
    [
        (_NODE, {}, "eth0", "10.0.0.5", "carries the node's address 10.0.0.5"),
        (_NODE, {"override": "ib0"}, "ib0", "192.168.7.5", "from network.interface"),
        (_NODE, {"override": "eth0"}, "eth0", "10.0.0.5", "from network.interface"),
        (
            _NODE,
            {"environment": {"GLOO_SOCKET_IFNAME": "ib0"}},
            "ib0",
            "192.168.7.5",
            "kept from GLOO_SOCKET_IFNAME of the node",
        ),
        (
            _NODE,
            {"environment": {"GLOO_SOCKET_IFNAME": "ib0"}, "override": "eth0"},
            "ib0",
            "192.168.7.5",
            "kept from GLOO_SOCKET_IFNAME of the node",
        ),
        (
            _NODE,
            {"environment": {"GLOO_SOCKET_IFNAME": ""}},
            "eth0",
            "10.0.0.5",
            "carries the node's address 10.0.0.5",
        ),
        (
            [_LO, _SIX],
            {"node_address": "2001:db8::5"},
            "eth6",
            "2001:db8::5",
            "carries the node's address 2001:db8::5",
        ),
        (
            [_LO, _SIX],
            {"node_address": "2001:DB8:0:0::5"},
            "eth6",
            "2001:db8::5",
            "carries the node's address 2001:DB8:0:0::5",
        ),
        ([_ETH0, _SIX], {"override": "eth6"}, "eth6", "2001:db8::5", "from network.interface"),
        ([_WSL_LO], {"override": "lo"}, "lo", "10.255.255.254", "from network.interface"),
        (
            [_LO],
            {"node_address": "127.0.0.1", "num_nodes": 1},
            "lo",
            "127.0.0.1",
            "carries the node's address 127.0.0.1",
        ),
        (
            [_LO],
            {"node_address": "::1", "num_nodes": 1},
            "lo",
            "::1",
            "carries the node's address ::1",
        ),
    ],
    ids=[
        "route", "override", "override_with_the_route", "preset", "preset_before_override",
        "empty_preset_is_none", "ipv6", "ipv6_spelled_otherwise", "link_local_is_the_last_resort",
        "loopback_is_the_last_resort", "one_node_on_loopback", "one_node_on_loopback_ipv6",
    ],
)  # fmt: skip
def test_choice_of_interface_address_and_reason(
    interfaces: list[Interface], changes: dict[str, Any], interface: str, address: str, reason: str
) -> None:
    choice = _choose(interfaces, **changes)
    assert choice == NetworkChoice(interface=interface, address=address, reason=reason)


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        ({"node_address": "127.0.0.1"}, "route"),
        ({"override": "lo"}, "override"),
        ({"environment": {"GLOO_SOCKET_IFNAME": "lo"}}, "preset"),
        ({"node_address": "::1", "num_nodes": 16}, "route"),
    ],
)
def test_choice_of_loopback_between_nodes_is_refused(changes: dict[str, Any], source: str) -> None:
    count = changes.get("num_nodes", 2)
    with pytest.raises(
        ClusterError, match=f"Node node-3: interface lo is loopback, and ranks sit on {count} nodes"
    ):
        _choose(_NODE, **changes)


@pytest.mark.parametrize("name", ["^docker0", "eth1", "eth0,ib0", "=eth0"])
@pytest.mark.parametrize(
    ("source", "changes"),
    [("GLOO_SOCKET_IFNAME of the node", "environment"), ("network.interface", "override")],
)
def test_choice_by_a_name_that_is_no_interface_is_refused_with_those_that_are(
    name: str, source: str, changes: str
) -> None:
    value = {"GLOO_SOCKET_IFNAME": name} if changes == "environment" else name
    expected = (
        f"Node node-3: {source} names '{name}', which is not an interface with an address "
        "there (it has docker0, eth0, ib0, lo)."
    )
    with pytest.raises(ClusterError, match=re.escape(expected)):
        _choose(_NODE, **{changes: value})


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_choice_where_no_interface_carries_the_address_is_refused(num_nodes: int) -> None:
    with pytest.raises(
        ClusterError, match=r"no interface has the node's address 10\.9\.9\.9 \(it has docker0"
    ):
        _choose(_NODE, node_address="10.9.9.9", num_nodes=num_nodes)


def test_choice_for_a_node_known_by_name_is_refused_with_a_way_out() -> None:
    with pytest.raises(ClusterError, match="--node-ip-address"):
        _choose(_NODE, node_address="head.cluster.local")


def test_choice_on_a_node_without_interfaces_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"\(it has none\)"):
        _choose([])


def test_environment_between_nodes_names_one_interface_to_gloo_and_nccl() -> None:
    assert network_environment(_choose(_NODE), num_nodes=2, environment={}) == {
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "=eth0",
    }


def test_environment_on_one_node_leaves_nccl_alone() -> None:
    assert network_environment(_choose(_NODE), num_nodes=1, environment={}) == {
        "GLOO_SOCKET_IFNAME": "eth0"
    }


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"NCCL_SOCKET_IFNAME": "^docker0"}, {"GLOO_SOCKET_IFNAME": "eth0"}),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, {"NCCL_SOCKET_IFNAME": "=eth0"}),
        ({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth"}, {}),
        (
            {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": ""},
            {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"},
        ),
    ],
)
def test_environment_that_the_site_has_set_is_kept(
    environment: dict[str, str], expected: dict[str, str]
) -> None:
    choice = _choose(_NODE, environment=environment)
    assert network_environment(choice, num_nodes=2, environment=environment) == expected


def test_interfaces_of_this_machine_have_loopback_among_them() -> None:
    found = list_interfaces()
    assert any(i.is_loopback for i in found)
    assert all(i.addresses and "%" not in a for i in found for a in i.addresses)
