# SPDX-License-Identifier: Apache-2.0
"""What `ray start` is given on a node of a local cluster. Pure; nothing is faked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raydist.testing.local_ray import RayOffer, head_arguments, host_port, start_arguments


def _options(arguments: list[str]) -> dict[str, str]:
    return dict(argument.removeprefix("--").partition("=")[::2] for argument in arguments)


def _offer() -> RayOffer:
    return RayOffer(cpus=2, gpus=1, object_store_bytes=80 << 20, resources={"spot": 1})


def test_two_ray_nodes_of_a_host_want_different_ports() -> None:
    first, second = (
        _options(start_arguments(_offer(), address="10.0.0.1", index=index)) for index in (0, 1)
    )
    assert int(first["max-worker-port"]) < int(second["min-worker-port"])
    assert first["dashboard-agent-listen-port"] != second["dashboard-agent-listen-port"]
    assert first["node-ip-address"] == second["node-ip-address"] == "10.0.0.1"


def test_node_offers_what_it_is_given() -> None:
    given = _options(start_arguments(_offer(), address="fd00::1", index=0))
    assert (given["num-cpus"], given["num-gpus"]) == ("2", "1")
    assert json.loads(given["resources"]) == {"spot": 1}
    assert given["object-store-memory"] == str(80 * 2**20)


@pytest.mark.parametrize(("loopback", "has_server"), [(None, "false"), ("::1", "true")])
def test_head_has_a_job_server_only_when_asked(loopback: str | None, has_server: str) -> None:
    given = _options(head_arguments(folder=Path("/tmp/bed/ray"), loopback=loopback))
    assert given["include-dashboard"] == has_server
    assert given.get("dashboard-host") == loopback
    assert given["temp-dir"] == "/tmp/bed/ray"


def test_ipv6_address_is_bracketed_before_its_port() -> None:
    assert host_port("fd00::1", 6379) == "[fd00::1]:6379"
    assert host_port("10.0.0.1", 6379) == "10.0.0.1:6379"
