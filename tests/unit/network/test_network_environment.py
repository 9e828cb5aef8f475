# SPDX-License-Identifier: Apache-2.0
"""The variables a choice implies, library by library. Made up: the nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from network_machines import AZURE_ND, P5, SIX, TWO_NETWORKS, UNLIKE_NAMES

from raydist.network import (
    ImpliedEnvironment,
    NodeNetwork,
    RdmaDevice,
    choose_network,
    network_environment,
)

_ABORT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def _implied(nodes: list[NodeNetwork], **changes: Any) -> ImpliedEnvironment:
    choice = choose_network(nodes).by_node["id-n1"]
    arguments: dict[str, Any] = {"num_nodes": len(nodes), "backend": "nccl"}
    return network_environment(choice, nodes[0], **(arguments | changes))


def _with_rdma(*devices: RdmaDevice, **environment: str) -> list[NodeNetwork]:
    first = replace(UNLIKE_NAMES[0], rdma=devices, environment=environment)
    return [first, UNLIKE_NAMES[1]]


_SLOW = RdmaDevice(name="mlx5_9", kind="roce", speed_mbps=25_000)
_FAST = [RdmaDevice(name=f"mlx5_{k}", kind="roce", speed_mbps=400_000) for k in (1, 0)]


@pytest.mark.parametrize(
    ("nodes", "changes", "expected"),
    [
        (UNLIKE_NAMES, {"backend": "gloo"}, {"GLOO_SOCKET_IFNAME": "ens5"}),
        (
            UNLIKE_NAMES,
            {},
            {"GLOO_SOCKET_IFNAME": "ens5", "NCCL_SOCKET_IFNAME": "=ens5", "NCCL_IB_DISABLE": "1"}
            | _ABORT,
        ),
        (UNLIKE_NAMES, {"num_nodes": 1}, {"GLOO_SOCKET_IFNAME": "ens5"} | _ABORT),
        (UNLIKE_NAMES, {"num_nodes": 1, "backend": "gloo"}, {"GLOO_SOCKET_IFNAME": "ens5"}),
        (
            SIX,
            {},
            {
                "GLOO_SOCKET_IFNAME": "eth0",
                "NCCL_SOCKET_IFNAME": "=eth0",
                "NCCL_SOCKET_FAMILY": "AF_INET6",
                "NCCL_IB_DISABLE": "1",
            }
            | _ABORT,
        ),
        (
            AZURE_ND,
            {},
            {
                "GLOO_SOCKET_IFNAME": "eth0",
                "NCCL_SOCKET_IFNAME": "=eth0",
                "NCCL_IB_HCA": "=" + ",".join(f"mlx5_ib{k}:1" for k in range(8)),
            }
            | _ABORT,
        ),
        (
            P5,
            {},
            {
                "GLOO_SOCKET_IFNAME": "enp71s0",
                "NCCL_SOCKET_IFNAME": "=enp71s0",
                "FI_PROVIDER": "efa",
            }
            | _ABORT,
        ),
        (
            _with_rdma(_SLOW, *_FAST),
            {},
            {
                "GLOO_SOCKET_IFNAME": "ens5",
                "NCCL_SOCKET_IFNAME": "=ens5",
                "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
            }
            | _ABORT,
        ),
        (
            _with_rdma(replace(_FAST[0], is_active=False)),
            {},
            {"GLOO_SOCKET_IFNAME": "ens5", "NCCL_SOCKET_IFNAME": "=ens5"} | _ABORT,
        ),
        (
            UNLIKE_NAMES,
            {"debug": "trace", "backend": "gloo", "trace_prefix": "/run/fr_"},
            {
                "GLOO_SOCKET_IFNAME": "ens5",
                "TORCH_FR_BUFFER_SIZE": "20000",
                "TORCH_FR_DUMP_TEMP_FILE": "/run/fr_",
            },
        ),
        (
            UNLIKE_NAMES,
            {"debug": "info", "num_nodes": 1},
            {
                "GLOO_SOCKET_IFNAME": "ens5",
                "NCCL_DEBUG": "INFO",
                "NCCL_DEBUG_SUBSYS": "INIT,NET",
            }
            | _ABORT,
        ),
        (
            UNLIKE_NAMES,
            {"debug": "trace", "num_nodes": 1},
            {
                "GLOO_SOCKET_IFNAME": "ens5",
                "NCCL_DEBUG": "INFO",
                "NCCL_DEBUG_SUBSYS": "INIT,NET",
                "TORCH_FR_BUFFER_SIZE": "20000",
                "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            }
            | _ABORT,
        ),
    ],
    ids=[
        "gloo", "nccl", "one_node", "one_node_gloo", "ipv6", "infiniband", "efa", "roce",
        "inactive", "trace_gloo", "info", "trace",
    ],
)  # fmt: skip
def test_environment_in_each_librarys_syntax(
    nodes: list[NodeNetwork], changes: dict[str, Any], expected: dict[str, str]
) -> None:
    implied = _implied(nodes, **changes)
    assert implied.values == expected
    assert implied.kept == {}
    assert implied.warnings == ()


def test_what_the_site_has_set_is_kept_and_said() -> None:
    site = {"NCCL_SOCKET_IFNAME": "ens", "NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": ""}
    first = replace(UNLIKE_NAMES[0], environment=site)
    implied = _implied([first, UNLIKE_NAMES[1]], debug="info")
    assert implied.kept == {"NCCL_SOCKET_IFNAME": "ens", "NCCL_DEBUG": "WARN"}
    assert not set(implied.kept) & set(implied.values)
    lines = implied.explain()
    assert "GLOO_SOCKET_IFNAME=ens5  carries the cluster address 10.0.0.1; within " in lines[0]
    assert "NCCL_SOCKET_IFNAME=ens  kept from the node" in lines
    assert len(lines) == len(implied.kept) + len(implied.values)


@pytest.mark.parametrize(
    ("nodes", "warning"),
    [
        (
            _with_rdma(GLOO_SOCKET_IFNAME="ens5", NCCL_SOCKET_IFNAME="^ens"),
            "n1: NCCL_SOCKET_IFNAME=^ens leaves out ens5",
        ),
        (
            _with_rdma(*_FAST, NCCL_IB_DISABLE="1"),
            "n1: NCCL_IB_DISABLE=1, and 2 active RDMA ports (mlx5_0, ...) stay idle",
        ),
        (_with_rdma(NCCL_SOCKET_FAMILY="AF_INET6"), "n1: NCCL_SOCKET_FAMILY=AF_INET6, and the"),
        (
            _with_rdma(RdmaDevice(name="efa_0", kind="efa"), FI_PROVIDER="tcp"),
            "n1: FI_PROVIDER=tcp, and its EFA adapters stay idle",
        ),
    ],
)
def test_kept_value_that_contradicts_the_choice_is_warned_of(
    nodes: list[NodeNetwork], warning: str
) -> None:
    implied = _implied(nodes)
    assert [w[: len(warning)] for w in implied.warnings] == [warning]
    assert _implied(nodes, backend="gloo").warnings == ()


def test_every_node_gets_its_own_name() -> None:
    decision = choose_network(TWO_NETWORKS)
    names = {
        n.node: network_environment(
            decision.by_node[n.node_id], n, num_nodes=3, backend="nccl"
        ).values["NCCL_SOCKET_IFNAME"]
        for n in TWO_NETWORKS
    }
    assert names == {"n1": "=ens5", "n2": "=enp7s0", "n3": "=ens5"}
