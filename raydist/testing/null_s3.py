# SPDX-License-Identifier: Apache-2.0
"""An S3 server that counts bytes and keeps none: what a transfer costs the client alone.

It checks no signature, and every ranged GET is answered with zeros of an object of 1 TiB. A process
of its own, so that it shares no interpreter lock with the client:

    python -m raydist.testing.null_s3
"""

from __future__ import annotations

import io
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from types import TracebackType
from typing import Any

BUCKET = "null-sink"
_BUFFER_BYTES = 1 << 20
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_RANGE = re.compile(rb"\r\nrange: *bytes=(\d+)-(\d+)", re.IGNORECASE)
_OBJECT_BYTES = 1 << 40
_UPLOAD = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
_COMPLETED = b"<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>"


class NullS3:
    """One sink from ``__enter__`` to ``__exit__``; its bucket is ``BUCKET``."""

    def __init__(self) -> None:
        self.endpoint_url = ""
        self._process: subprocess.Popen[str] | None = None

    def environment(self) -> dict[str, str]:
        """Return the AWS_* variables with which any S3 client uses this sink."""
        return {
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def bytes_received(self) -> int:
        """Return the bytes of all bodies so far."""
        with urllib.request.urlopen(f"{self.endpoint_url}/?received") as reply:
            return int(reply.read())

    def __enter__(self) -> NullS3:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdout=subprocess.PIPE, text=True
        )
        port = self._process.stdout.readline() if self._process.stdout else ""
        self.endpoint_url = f"http://127.0.0.1:{int(port)}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()


class _Sink:
    def __init__(self) -> None:
        self.received = 0
        self.lock = threading.Lock()

    def serve(self, connection: socket.socket) -> None:
        """Answer the requests of one connection until the client closes it."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = connection.makefile("rb", 0)
        with connection, io.BufferedReader(stream, _BUFFER_BYTES) as reader:
            buffer = memoryview(bytearray(_BUFFER_BYTES))
            while head := _read_head(reader):
                if b"100-continue" in head:
                    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                length = _take_body(reader, head, buffer)
                self._answer(connection, head, length)

    def _answer(self, connection: socket.socket, head: bytes, length: int) -> None:
        with self.lock:
            self.received += length if head.startswith(b"PUT") else 0
        line = head.split(b"\r", 1)[0]
        asked = _RANGE.search(head)
        if line.startswith(b"GET") and asked:
            _send_zeros(connection, int(asked[1]), int(asked[2]))
            return
        body = b""
        if line.startswith(b"POST"):
            body = _UPLOAD if b"uploadId=" not in line else _COMPLETED
        elif b"?received" in line:
            body = str(self.received).encode()
        reply = b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: %d\r\n\r\n%b' % (len(body), body)
        connection.sendall(reply)


def _read_head(reader: io.BufferedReader[Any]) -> bytes:
    lines: list[bytes] = []
    while (line := reader.readline()) not in (b"\r\n", b""):
        lines.append(line)
    return b"".join(lines)


def _take_body(reader: io.BufferedReader[Any], head: bytes, buffer: memoryview) -> int:
    found = _LENGTH.search(head)
    if found:
        return _discard(reader, int(found[1]), buffer)
    total = 0
    if _CHUNKED.search(head):
        while size := int(reader.readline().split(b";")[0], 16):
            total += _discard(reader, size, buffer)
            reader.readline()
        reader.readline()
    return total


def _discard(reader: io.BufferedReader[Any], num_bytes: int, buffer: memoryview) -> int:
    left = num_bytes
    while left:
        count = reader.readinto(buffer[:left])
        if not count:
            break
        left -= count
    return num_bytes - left


def _send_zeros(connection: socket.socket, first: int, last: int) -> None:
    head = 'HTTP/1.1 206 Partial Content\r\nETag: "e"\r\n'
    head += f"Content-Length: {last + 1 - first}\r\n"
    head += f"Content-Range: bytes {first}-{last}/{_OBJECT_BYTES}\r\n\r\n"
    connection.sendall(head.encode())
    zeros = memoryview(bytes(_BUFFER_BYTES))
    for at in range(first, last + 1, _BUFFER_BYTES):
        connection.sendall(zeros[: last + 1 - at])


def main() -> None:
    """Serve on a free port of loopback, told on standard output, until killed."""
    sink = _Sink()
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=sink.serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()
