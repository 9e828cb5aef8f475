# SPDX-License-Identifier: Apache-2.0
"""A proxy that does harm: between an S3 client and a real server, on loopback.

The client's Host header is passed on as it is, since its signature covers it.
"""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import parse_qsl, unquote, urlsplit

from raydist.clock import Clock, SystemClock
from raydist.testing.s3_faults import Act, Exchange, Reply

_HOP_BY_HOP = frozenset({"connection", "expect", "keep-alive", "transfer-encoding"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Which requests go wrong, and how.

    Fields:
        act: What is done instead of passing request and reply on.
        operation: S3's name, such as ``UploadPart``; None is any.
        key: Regular expression, searched for in bucket/key.
        nth: The first of the matching requests that is hit, from 1.
        times: How many are hit from there; None is for ever.
        from_s: Seconds after the proxy's start before which none is hit.
    """

    act: Act
    operation: str | None = None
    key: str = ""
    nth: int = 1
    times: int | None = None
    from_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One request that came in, and whether a fault hit it."""

    operation: str
    path: str
    was_hit: bool


class S3Proxy:
    """From ``__enter__`` to ``__exit__`` in front of ``upstream_url``.

    Args:
        upstream_url: The real server's endpoint.
        clock: Time, for ``Fault.from_s``.
    """

    def __init__(self, upstream_url: str, *, clock: Clock | None = None) -> None:
        self.seen: list[Seen] = []
        self._upstream = urlsplit(upstream_url)
        self._clock = clock or SystemClock()
        self._faults: list[Fault] = []
        self._counts: list[int] = []
        self._lock = threading.Lock()
        self._started_s = self._clock.monotonic_s()
        self._is_over = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler_class(self))
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self.endpoint_url = f"http://127.0.0.1:{self._http.server_port}"

    def set_faults(self, faults: Sequence[Fault]) -> None:
        """Replace the script, and forget what was seen."""
        with self._lock:
            self._faults = list(faults)
            self._counts = [0] * len(self._faults)
            self.seen = []
            self._started_s = self._clock.monotonic_s()

    def operations(self) -> list[str]:
        """Return the S3 operations seen since the last ``set_faults``, in order."""
        with self._lock:
            return [one.operation for one in self.seen]

    def __enter__(self) -> S3Proxy:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()  # ends replies that never come
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        """Pass one request on, or do to it what the first fault that fits says."""
        url = urlsplit(handler.path)
        operation = operation_of(handler.command, url.path, url.query)
        act = self._choose(operation, unquote(url.path).lstrip("/"))
        exchange = Exchange(
            handler=handler, forward=lambda body: self._forward(handler, body), end=self._is_over
        )
        if act is None:
            exchange.pass_on()
        else:
            act(exchange)

    def _choose(self, operation: str, path: str) -> Act | None:
        with self._lock:
            found: Act | None = None
            for index, fault in enumerate(self._faults):
                is_meant = fault.operation in (None, operation) and re.search(fault.key, path)
                is_early = self._clock.monotonic_s() - self._started_s < fault.from_s
                if not is_meant or is_early:
                    continue
                self._counts[index] += 1
                number = self._counts[index] - fault.nth
                if found is None and number >= 0 and (fault.times is None or number < fault.times):
                    found = fault.act
            self.seen.append(Seen(operation=operation, path=path, was_hit=found is not None))
            return found

    def _forward(self, handler: BaseHTTPRequestHandler, body: bytes) -> Reply:
        upstream = http.client.HTTPConnection(self._upstream.netloc, timeout=30)
        try:
            upstream.putrequest(
                handler.command, handler.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in handler.headers.items():
                if name.lower() not in _HOP_BY_HOP:
                    upstream.putheader(name, value)
            upstream.endheaders(body or None)
            answer = upstream.getresponse()
            return Reply(
                status=answer.status,
                headers=[
                    (name, value)
                    for name, value in answer.getheaders()
                    if name.lower() not in _HOP_BY_HOP
                ],
                body=answer.read(),
            )
        finally:
            upstream.close()


def operation_of(method: str, path: str, query: str) -> str:
    """Return S3's name of a path-style request."""
    asked = {name for name, _ in parse_qsl(query, keep_blank_values=True)}
    has_key = bool(path.lstrip("/").partition("/")[2])
    if "uploads" in asked:
        return "CreateMultipartUpload" if method == "POST" else "ListMultipartUploads"
    if "uploadId" in asked:
        return {
            "PUT": "UploadPart",
            "POST": "CompleteMultipartUpload",
            "DELETE": "AbortMultipartUpload",
        }.get(method, "ListParts")
    if not has_key:
        return {"HEAD": "HeadBucket", "GET": "ListObjectsV2"}.get(method, f"{method} bucket")
    return f"{method.capitalize()}Object"


def _handler_class(proxy: S3Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            proxy.serve(self)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve

        def handle_expect_100(self) -> bool:
            return True  # sent when the body is wanted: a fault may refuse it before

        def log_message(self, format: str, *args: object) -> None:
            """Keep quiet: the requests are there to be looked at."""

    return Handler
