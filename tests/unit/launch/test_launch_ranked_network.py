# SPDX-License-Identifier: Apache-2.0
"""A rank's network from MASTER_ADDR. Real: this machine's interfaces, its resolver, its routes."""

from __future__ import annotations

import os

import pytest

from raydist.config import NetworkConfig
from raydist.errors import ClusterError
from raydist.launch.ranked_network import choose_by_route
from raydist.world import World


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(("GLOO_", "NCCL_", "TORCH_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", dict(os.environ))


def _world(num_nodes: int) -> World:
    return World(
        world_size=2 * num_nodes, rank=0, local_world_size=2, local_rank=0, num_nodes=num_nodes,
        node_rank=0,
    )  # fmt: skip


def test_rank_0_on_this_node_alone_is_reached_over_loopback() -> None:
    choice, implied = choose_by_route(
        _world(1), NetworkConfig(), master_addr="127.0.0.1", backend="gloo"
    )
    assert (choice.interface, choice.address) == ("lo", "127.0.0.1")
    assert implied.values["GLOO_SOCKET_IFNAME"] == os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_name_that_does_not_resolve_is_named_with_the_variable() -> None:
    with pytest.raises(ClusterError, match=r"MASTER_ADDR=no-such-host\.invalid does not resolve"):
        choose_by_route(
            _world(2), NetworkConfig(), master_addr="no-such-host.invalid", backend="gloo"
        )


def test_loopback_between_nodes_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"MASTER_ADDR=127\.0\.0\.1 is 127\.0\.0\.1 on node"):
        choose_by_route(_world(2), NetworkConfig(), master_addr="127.0.0.1", backend="gloo")


def test_loopback_that_the_site_has_set_between_nodes_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(os.environ, "GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(ClusterError, match="interface lo is loopback"):
        choose_by_route(_world(2), NetworkConfig(), master_addr=_own_address(), backend="gloo")


def test_interface_that_is_not_there_is_refused_by_key() -> None:
    network = NetworkConfig(interface="nosuch0")
    with pytest.raises(ClusterError, match=r"network\.interface names 'nosuch0'"):
        choose_by_route(_world(1), network, master_addr="127.0.0.1", backend="gloo")


def _own_address() -> str:
    from raydist.network import inventory

    facts = inventory(node_id="0", address="127.0.0.1")
    found = [ip for i in facts.interfaces if not i.is_loopback and i.is_up for ip in i.ips]
    if not found:
        pytest.skip("this machine has loopback alone")
    return found[0]
