# SPDX-License-Identifier: Apache-2.0
"""Trying a network: does each node answer on it, and how fast. Plain TCP, no torch.

Each node listens on its candidate addresses; each asks all others. A peer proves by a token that
it is the one meant: a private address may belong to another machine here than there.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

logger = logging.getLogger(__name__)

_TOKEN_BYTES = 16
_REACH, _BURST = b"r", b"b"
_ANSWER = struct.Struct("!Qd")  # bytes received, seconds from the first to the last
_CHUNK = bytes(256 * 1024)
_MAX_THREADS = 32
_SERVE_TIMEOUT_S = 30.0
_FORGOTTEN_AFTER_S = 300.0
_SEND_BUFFER_BYTES = 1 << 20
"""Bounds what is on its way when the time is over: a slow link must empty it before it answers."""


class ProbeServer:
    """Answers probes on this node's addresses until it is closed, or forgotten for minutes.

    An address that cannot be bound has no port: nobody is answered there.
    """

    def __init__(self, addresses: Sequence[str], *, token: bytes) -> None:
        self._token = token
        self._sockets: dict[str, socket.socket] = {}
        self._is_closed = False
        for address in addresses:
            try:
                self._sockets[address] = socket.create_server(
                    (address, 0), family=_family(address), backlog=128
                )
            except OSError as error:
                logger.warning("nobody can be answered on %s: %s", address, error)
        for listener in self._sockets.values():
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        self._forgotten = threading.Timer(_FORGOTTEN_AFTER_S, self.close)
        self._forgotten.daemon = True
        self._forgotten.start()

    @property
    def ports(self) -> dict[str, int]:
        """The port on each address that could be bound."""
        return {address: s.getsockname()[1] for address, s in self._sockets.items()}

    def close(self) -> None:
        """Stop listening."""
        self._is_closed = True
        self._forgotten.cancel()
        for listener in self._sockets.values():
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # Wakes the thread in accept.
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_closed:
            try:
                peer, _ = listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        # A peer that goes away in the middle reports it itself, on its own side.
        with peer, contextlib.suppress(OSError):
            peer.settimeout(_SERVE_TIMEOUT_S)
            asked = _receive(peer, _TOKEN_BYTES + 1)
            if asked[:_TOKEN_BYTES] != self._token:
                return
            peer.sendall(self._token)
            if asked[_TOKEN_BYTES:] == _BURST:
                peer.sendall(_ANSWER.pack(*_drain(peer)))


def try_peers(
    peers: Mapping[str, tuple[str, int]], *, source: str, token: bytes, timeout_s: float
) -> dict[str, str | None]:
    """Ask every peer for an answer, all at once.

    Args:
        peers: Address and port by node id.
        source: Own address on the network that is tried.
        token: What a peer must answer with.
        timeout_s: Of each peer.

    Returns:
        By node id, None where it answered, else what went wrong.
    """

    def ask(where: tuple[str, int]) -> str | None:
        try:
            with _connect(where, source, token, _REACH, timeout_s):
                return None
        except OSError as error:
            return _why(error, timeout_s)

    if not peers:
        return {}
    with ThreadPoolExecutor(min(_MAX_THREADS, len(peers))) as pool:
        return dict(zip(peers, pool.map(ask, peers.values()), strict=True))


def send_rate_mbps(
    where: tuple[str, int], *, source: str, token: bytes, seconds: float, timeout_s: float
) -> float | None:
    """Send to a peer for a while and return the rate at which it received, in Mb/s.

    Returns:
        None where the data did not get through.
    """
    try:
        with _connect(where, source, token, _BURST, timeout_s) as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                peer.sendall(_CHUNK)
            peer.shutdown(socket.SHUT_WR)
            num_bytes, took_s = _ANSWER.unpack(_receive(peer, _ANSWER.size))
    except OSError:
        return None
    return num_bytes * 8 / 1e6 / took_s if took_s > 0 else None


def _connect(
    where: tuple[str, int], source: str, token: bytes, mode: bytes, timeout_s: float
) -> socket.socket:
    """Connect from ``source`` and prove the peer.

    Raises:
        OSError: It cannot be reached, or is another than the one meant.
    """
    peer = socket.create_connection(where, timeout_s, source_address=(source, 0))
    try:
        peer.sendall(token + mode)
        if _receive(peer, _TOKEN_BYTES) != token:
            raise OSError("another machine answers there")
    except OSError:
        peer.close()
        raise
    return peer


def _drain(peer: socket.socket) -> tuple[int, float]:
    """Receive to the end; return bytes after the first, and the seconds they took."""
    buffer = bytearray(1 << 20)
    peer.recv_into(buffer)  # The clock starts at the first bytes, which are not counted.
    begun, received = time.monotonic(), 0
    last = begun
    while size := peer.recv_into(buffer):
        received += size
        last = time.monotonic()
    return received, last - begun


def _receive(peer: socket.socket, size: int) -> bytes:
    """Receive exactly so many bytes.

    Raises:
        OSError: The peer closed before.
    """
    data = b""
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise OSError("closed without the right answer")
        data += part
    return data


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _why(error: OSError, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    return error.strerror or str(error)
