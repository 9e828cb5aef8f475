# SPDX-License-Identifier: Apache-2.0
"""An HTTP server on loopback that answers S3 requests from a script: for failures on purpose."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

Answer = Callable[[BaseHTTPRequestHandler], None]
"""Sends one reply, or none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedRequest:
    """One request as it came in."""

    method: str
    path: str
    headers: Message
    body: bytes


class ScriptedS3:
    """Answers requests in turn from ``script``, with its last answer again and again.

    Used as a context manager; ``requests`` are those received so far.
    """

    def __init__(self) -> None:
        self.script: list[Answer] = []
        self.requests: list[ReceivedRequest] = []
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._make_handler())
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self.endpoint_url = f"http://127.0.0.1:{self._http.server_port}"

    @property
    def methods(self) -> list[str]:
        """HTTP methods of the requests so far."""
        return [request.method for request in self.requests]

    def __enter__(self) -> ScriptedS3:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _next(self, request: ReceivedRequest) -> Answer:
        with self._lock:
            self.requests.append(request)
            return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        choose = self._next

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                send = choose(
                    ReceivedRequest(
                        method=self.command, path=self.path, headers=self.headers, body=body
                    )
                )
                send(self)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve

            def log_message(self, format: str, *args: object) -> None:
                """Keep quiet: the requests are there to be looked at."""

        return Handler


def answer(status: int, body: bytes = b"", **headers: str) -> Answer:
    """Reply with these; ``_`` in a header's name stands for ``-``."""

    def send(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return send


def error_answer(status: int, code: str) -> Answer:
    """Reply with an S3 error document."""
    body = f"<Error><Code>{code}</Code><Message>{code} it is</Message></Error>"
    return answer(status, body.encode(), Content_Type="application/xml")


def whole_object(data: bytes) -> Answer:
    """Reply to a ranged GET with an object that fits in the range."""
    return answer(206, data, Content_Range=f"bytes 0-{len(data) - 1}/{len(data)}", ETag='"e"')


def object_head(size_bytes: int) -> Answer:
    """Reply to the HEAD of an object."""
    return answer(200, Content_Length=str(size_bytes))


def lose_reply(handler: BaseHTTPRequestHandler) -> None:
    """Take the request, then hang up."""
    handler.close_connection = True


def cut_body(handler: BaseHTTPRequestHandler) -> None:
    """Announce ten bytes, send five, hang up."""
    handler.send_response(206)
    handler.send_header("Content-Length", "10")
    handler.send_header("Content-Range", "bytes 0-9/10")
    handler.end_headers()
    handler.wfile.write(b"01234")
    handler.close_connection = True
