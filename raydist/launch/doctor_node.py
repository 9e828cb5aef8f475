# SPDX-License-Identifier: Apache-2.0
"""What a doctor's actor does on its node."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence

from raydist.clock import SystemClock
from raydist.doctor import NodeFacts, StorageFacts
from raydist.doctor.machine import collect_node_facts
from raydist.doctor.storage_check import (
    check_storage,
    open_for_check,
    put_marker,
    remove_marker,
    unseen_markers,
)
from raydist.errors import RaydistError
from raydist.launch.cluster import session_folder
from raydist.storage.open import parse_url


def describe_machine(node_id: str, address: str) -> NodeFacts:
    """Return this machine's facts."""
    return collect_node_facts(
        node=socket.gethostname(),
        node_id=node_id,
        address=address,
        clock=SystemClock(),
        folders={"ray": session_folder()},
    )


def tell_time() -> tuple[float, float]:
    """Return this node's clock when the question came and when it replied, in Unix seconds."""
    return time.time(), time.time()


def check_node_storage(url: str, node: str) -> StorageFacts:
    """Do with the storage what a run does, and measure it."""
    return check_storage(url, node=node, clock=SystemClock())


def leave_marker(url: str, session: str, node: str) -> None:
    """Leave an object for the other nodes to see."""
    put_marker(open_for_check(url, clock=SystemClock()), session=session, node=node)


def look_for_markers(url: str, session: str, nodes: Sequence[str]) -> tuple[str, ...]:
    """Return the nodes whose object is not seen from here."""
    store = open_for_check(url, clock=SystemClock())
    return unseen_markers(store, session=session, nodes=nodes)


def take_marker_away(url: str, session: str, node: str) -> None:
    """Remove this node's object."""
    remove_marker(open_for_check(url, clock=SystemClock()), session=session, node=node)


def check_readable(location: str) -> str | None:
    """Return why a file, folder or s3:// location cannot be read from here; None when it can."""
    try:
        place = parse_url(location)
        if place.bucket is None:
            return _unreadable_path(place.path)
        folder, _, name = location.rstrip("/").rpartition("/")
        store = open_for_check(folder, clock=SystemClock())
        if store.size(name) is None and not any(True for _ in store.list(f"{name}/")):
            return "nothing is there"
    except RaydistError as error:
        return error.problem or str(error).splitlines()[0]
    return None


def _unreadable_path(path: str) -> str | None:
    try:
        if os.path.isdir(path):
            return None if os.listdir(path) else "the folder is empty"
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        return error.strerror or str(error)
    return None
