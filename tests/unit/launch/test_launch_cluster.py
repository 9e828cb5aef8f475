# SPDX-License-Identifier: Apache-2.0
"""RAY_ADDRESS, checked before Ray is asked. Real: sockets of this machine; no Ray."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from raydist.errors import ClusterError, FailureKind
from raydist.launch.cluster import check_reachable, cluster_address, connected


@pytest.fixture
def closed_port() -> int:
    """A port of this machine that nothing listens at."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextmanager
def _server(answer: bytes) -> Iterator[str]:
    """A server that gives one answer to the first who connects."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(1000)
                peer.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("value", [None, "", "  ", "local"])
def test_address_not_set_means_a_cluster_of_our_own(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if value is not None:
        monkeypatch.setenv("RAY_ADDRESS", value)
    assert cluster_address() is None


@pytest.mark.parametrize(
    "value", ["auto", "10.0.0.1:6379", "head.svc:6379", "[2001:db8::5]:6379", "h:1", "h:65535"]
)
def test_address_of_a_head_is_taken_as_it_is(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f" {value}\n")
    assert cluster_address() == value


@pytest.mark.parametrize("value", ["http://head:8265", "https://head/api"])
def test_address_for_submission_is_refused_pointing_to_submit(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", value)
    with pytest.raises(ClusterError) as caught:
        cluster_address()
    assert f"RAY_ADDRESS={value} is the address for job submission" in str(caught.value)
    assert "raydist submit" in str(caught.value)


@pytest.mark.parametrize("scheme", ["ray", "grpc"])
def test_address_of_ray_client_is_refused_by_its_scheme(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"{scheme}://head:10001")
    with pytest.raises(ClusterError, match=f"training is not started through {scheme}://"):
        cluster_address()


@pytest.mark.parametrize(
    "value", ["head", "head:", ":6379", "head:port", "head:0", "head:99999", "head:-1", "head:6e3"]
)
def test_address_without_a_possible_port_is_refused(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", value)
    with pytest.raises(
        ClusterError, match=re.escape(f"RAY_ADDRESS={value} is not host:port with a port in [1,")
    ) as caught:
        cluster_address()
    assert caught.value.kind is FailureKind.INPUT


def test_reachable_where_a_grpc_server_listens_passes() -> None:
    with _server(bytes((0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 100))) as address:
        check_reachable(address)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"+OK", b""])
def test_reachable_where_something_else_listens_is_refused(answer: bytes) -> None:
    with _server(answer) as address, pytest.raises(ClusterError, match="is not a Ray head") as why:
        check_reachable(address)
    assert "8265 is its dashboard" in str(why.value)


def test_reachable_where_nothing_listens_is_refused_at_once(closed_port: int) -> None:
    address = f"127.0.0.1:{closed_port}"
    with pytest.raises(ClusterError, match=f"Nothing answers at RAY_ADDRESS={address}: .*refused"):
        check_reachable(address)


def test_reachable_host_without_an_address_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"Nothing answers at RAY_ADDRESS=no-such-host\.invalid"):
        check_reachable("no-such-host.invalid:6379")


def test_connected_where_nothing_listens_is_refused_before_ray_is_asked(
    closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # or the call would set it for all tests
    with (
        pytest.raises(ClusterError, match="unset RAY_ADDRESS to train here"),
        connected(f"127.0.0.1:{closed_port}", start_timeout_s=60),
    ):
        pass
