# SPDX-License-Identifier: Apache-2.0
"""Trying a network, over real sockets of this machine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from raydist.network.probe import ProbeServer, send_rate_mbps, try_peers

TOKEN = b"0123456789abcdef"


@pytest.fixture
def server() -> Iterator[ProbeServer]:
    server = ProbeServer(["127.0.0.1", "127.0.0.2", "::1"], token=TOKEN)
    yield server
    server.close()


def test_peers_that_answer_have_no_error_and_others_say_why(server: ProbeServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening
        peers = {
            "up": ("127.0.0.1", server.ports["127.0.0.1"]),
            "up too": ("127.0.0.2", server.ports["127.0.0.2"]),
            "closed": ("127.0.0.1", taken.getsockname()[1]),
        }
        errors = try_peers(peers, source="127.0.0.1", token=TOKEN, timeout_s=5)
    assert errors == {"up": None, "up too": None, "closed": "Connection refused"}


def test_peer_over_ipv6_answers(server: ProbeServer) -> None:
    peers = {"six": ("::1", server.ports["::1"])}
    assert try_peers(peers, source="::1", token=TOKEN, timeout_s=5) == {"six": None}


def test_peer_of_another_run_is_not_taken_for_the_one_meant(server: ProbeServer) -> None:
    peers = {"other": ("127.0.0.1", server.ports["127.0.0.1"])}
    errors = try_peers(peers, source="127.0.0.1", token=b"x" * 16, timeout_s=5)
    assert errors == {"other": "closed without the right answer"}


def test_peer_that_says_something_else_is_another_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(100)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        peers = {"web": ("127.0.0.1", listener.getsockname()[1])}
        errors = try_peers(peers, source="127.0.0.1", token=TOKEN, timeout_s=5)
        thread.join()
    assert errors == {"web": "another machine answers there"}


def test_peer_that_accepts_and_stays_silent_is_given_up_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peers = {"silent": ("127.0.0.1", listener.getsockname()[1])}
        errors = try_peers(peers, source="127.0.0.1", token=TOKEN, timeout_s=0.2)
    assert errors == {"silent": "no answer within 0.2 s"}


def test_no_peers_have_no_errors() -> None:
    assert try_peers({}, source="127.0.0.1", token=TOKEN, timeout_s=1) == {}


def test_rate_is_what_the_peer_received(server: ProbeServer) -> None:
    where = ("127.0.0.1", server.ports["127.0.0.1"])
    rate = send_rate_mbps(where, source="127.0.0.1", token=TOKEN, seconds=0.05, timeout_s=5)
    assert rate is not None
    assert rate > 0


def test_rate_of_a_peer_that_is_not_there_is_none(server: ProbeServer) -> None:
    where = ("127.0.0.1", server.ports["127.0.0.1"])
    server.close()
    assert send_rate_mbps(where, source="127.0.0.1", token=TOKEN, seconds=0.05, timeout_s=1) is None


def test_server_on_an_address_that_is_not_here_has_no_port_there_and_answers_elsewhere() -> None:
    server = ProbeServer(["127.0.0.1", "192.0.2.1"], token=TOKEN)
    assert list(server.ports) == ["127.0.0.1"]
    peers = {"here": ("127.0.0.1", server.ports["127.0.0.1"])}
    assert try_peers(peers, source="127.0.0.1", token=TOKEN, timeout_s=5) == {"here": None}
    server.close()


def test_server_that_was_closed_frees_its_port(server: ProbeServer) -> None:
    port = server.ports["127.0.0.1"]
    server.close()
    with socket.create_server(("127.0.0.1", port)):
        pass
