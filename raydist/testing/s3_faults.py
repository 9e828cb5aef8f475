# SPDX-License-Identifier: Apache-2.0
"""What S3Proxy can do to a request and its reply: an act for each way a store fails."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler

_RESET = struct.pack("ii", 1, 0)  # linger for 0 s: closing sends RST


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The real server's reply, whole."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Exchange:
    """One request in the proxy's hands; nothing of its body has been read yet.

    Args:
        handler: The client's side.
        forward: Sends the request with this body to the real server.
        end: Set when the proxy stops.
    """

    def __init__(
        self,
        *,
        handler: BaseHTTPRequestHandler,
        forward: Callable[[bytes], Reply],
        end: threading.Event,
    ) -> None:
        self.handler = handler
        self.forward = forward
        self.end = end

    def take_body(self, num_bytes: int | None = None) -> bytes:
        """Read the request's body, or its first ``num_bytes``."""
        announced = int(self.handler.headers.get("Content-Length", 0))
        if announced and "100-continue" in self.handler.headers.get("Expect", "").lower():
            self.handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        wanted = announced if num_bytes is None else min(announced, num_bytes)
        return self.handler.rfile.read(wanted)

    def pass_on(self) -> None:
        """Do no harm."""
        self.send(self.forward(self.take_body()))

    def send(self, reply: Reply, num_bytes: int | None = None) -> None:
        """Send a reply; when ``num_bytes`` is given, only so much of the body it announces."""
        self.send_head(reply)
        if self.handler.command != "HEAD":
            self.handler.wfile.write(reply.body[:num_bytes])

    def send_head(self, reply: Reply) -> None:
        """Send status and headers."""
        self.handler.send_response_only(reply.status)
        for name, value in reply.headers:
            if name.lower() != "content-length" or self.handler.command == "HEAD":
                self.handler.send_header(name, value)
        if self.handler.command != "HEAD":
            self.handler.send_header("Content-Length", str(len(reply.body)))
        self.handler.end_headers()

    def reset(self) -> None:
        """Tear the connection down with a TCP reset."""
        self.handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.hang_up()
        self.handler.connection.close()

    def hang_up(self) -> None:
        """Let this be the connection's last exchange."""
        self.handler.close_connection = True


Act = Callable[[Exchange], None]


def answer_error(status: int, code: str) -> Act:
    """Refuse, without the real server's knowledge; the body is not asked for."""

    def act(exchange: Exchange) -> None:
        exchange.hang_up()
        exchange.send(_error(status, code))

    return act


def fail_after_it_happened(status: int = 500, code: str = "InternalError") -> Act:
    """Let the real server do it, and answer with an error."""

    def act(exchange: Exchange) -> None:
        exchange.forward(exchange.take_body())
        exchange.send(_error(status, code))

    return act


def answer_200_with_error(code: str = "InternalError") -> Act:
    """Answer 200 with an error document, as S3 does when a completion fails late."""

    def act(exchange: Exchange) -> None:
        exchange.take_body()
        exchange.send(replace(_error(200, code), headers=[("Content-Type", "application/xml")]))

    return act


def reset_in_request(after_bytes: int) -> Act:
    """Take so much of the body, then reset the connection."""

    def act(exchange: Exchange) -> None:
        exchange.take_body(after_bytes)
        exchange.reset()

    return act


def reset_in_reply(after_bytes: int) -> Act:
    """Send so much of the reply's body, then reset the connection."""

    def act(exchange: Exchange) -> None:
        exchange.send(exchange.forward(exchange.take_body()), after_bytes)
        exchange.reset()

    return act


def truncate_reply(after_bytes: int) -> Act:
    """Announce all of the reply's body, send so much of it, hang up."""

    def act(exchange: Exchange) -> None:
        exchange.send(exchange.forward(exchange.take_body()), after_bytes)
        exchange.hang_up()

    return act


def never_answer(*, does_it: bool = False) -> Act:
    """Take the request and be silent; ``does_it``: the real server gets it all the same."""

    def act(exchange: Exchange) -> None:
        body = exchange.take_body()
        if does_it:
            exchange.forward(body)
        exchange.hang_up()
        exchange.end.wait()

    return act


def trickle_reply(*, every_s: float) -> Act:
    """Send the reply's body a byte at a time, for as long as the client bears it."""

    def act(exchange: Exchange) -> None:
        reply = exchange.forward(exchange.take_body())
        exchange.hang_up()
        exchange.send_head(reply)
        with contextlib.suppress(ConnectionError):
            for at in range(len(reply.body)):
                if exchange.end.wait(every_s):
                    return
                exchange.handler.wfile.write(reply.body[at : at + 1])

    return act


def flip_in_request(at: int) -> Act:
    """Alter one byte of the body on its way to the store."""

    def act(exchange: Exchange) -> None:
        exchange.send(exchange.forward(_flipped(exchange.take_body(), at)))

    return act


def flip_in_reply(at: int) -> Act:
    """Alter one byte of the reply's body on its way to the client."""

    def act(exchange: Exchange) -> None:
        reply = exchange.forward(exchange.take_body())
        exchange.send(replace(reply, body=_flipped(reply.body, at)))

    return act


def hide_from_listing(key: str) -> Act:
    """Leave objects that match the regular expression out of a listing, as a stale one does."""

    def act(exchange: Exchange) -> None:
        reply = exchange.forward(exchange.take_body())
        body = re.sub(
            r"<Contents>.*?</Contents>",
            lambda item: "" if re.search(key, item[0]) else item[0],
            reply.body.decode(),
            flags=re.DOTALL,
        )
        exchange.send(replace(reply, body=body.encode()))

    return act


def _error(status: int, code: str) -> Reply:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>"
    return Reply(status=status, headers=[("Content-Type", "application/xml")], body=body.encode())


def _flipped(body: bytes, at: int) -> bytes:
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
