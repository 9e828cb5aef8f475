# SPDX-License-Identifier: Apache-2.0
"""Reaching a Ray cluster: the one RAY_ADDRESS names, or one of our own on this machine."""

from __future__ import annotations

import logging
import math
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from raydist.errors import ClusterError
from raydist.launch.cluster_view import ClusterView, NodeType, NodeView

_REACH_TIMEOUT_S = 5.0
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_HTTP2_SETTINGS = 4  # type of the frame with which a gRPC server answers (RFC 9113, 3.4)

_RAY_DEFAULTS = {
    # The controller's poll: it bounds failure detection, each report and the end of a run.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # Metrics are raydist's own files; nobody reads a node's drain notice yet. Each would
    # cost an actor process or a thread at every start.
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # A warning about Ray Train's own code.
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",
}


_JOIN_DEFAULTS = {
    # Ray tries for twelve minutes to join what is not its control service.
    "RAY_NUM_REDIS_GET_RETRIES": "2",
    "RAY_py_gcs_connect_timeout_s": "10",
}


def use_token_authentication() -> None:
    """Switch Ray's token authentication on, unless the environment says otherwise.

    Ray writes a token file when it starts a cluster, but clients do not look for it unasked.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")


def cluster_address() -> str | None:
    """Return the address in RAY_ADDRESS, checked for form, or None when it is not set.

    Raises:
        ClusterError: It is not an address that a training job can join.
    """
    address = os.environ.get("RAY_ADDRESS", "").strip()
    if not address or address == "local":
        return None
    if address == "auto":
        return address
    scheme = urlsplit(address).scheme if "://" in address else ""
    if scheme in ("http", "https"):
        raise ClusterError(
            problem=f"RAY_ADDRESS={address} is the address for job submission.",
            way_out="Use `raydist submit` or `ray job submit` with it, or set RAY_ADDRESS to "
            "the head's host:port (6379 by default).",
        )
    if scheme:
        raise ClusterError(
            problem=f"RAY_ADDRESS={address}: training is not started through {scheme}://.",
            way_out="Submit the job with `ray job submit`, or set RAY_ADDRESS to host:port.",
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ClusterError(
            problem=f"RAY_ADDRESS={address} is not host:port with a port in [1, 65535].",
            way_out="Set RAY_ADDRESS to the head's address, as `ray start --head` printed it.",
        )
    return address


def check_reachable(address: str) -> None:
    """Prove in seconds that a gRPC server, as a Ray head is one, listens at host:port.

    Raises:
        ClusterError: The name does not resolve, nothing answers, or something else does.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _REACH_TIMEOUT_S) as peer:
            is_grpc = os.environ.get("RAY_USE_TLS", "0") != "0" or _speaks_http2(peer)
    except (OSError, UnicodeError) as error:
        raise ClusterError(
            problem=f"Nothing answers at RAY_ADDRESS={address}: {error}.",
            way_out="Check that the head node runs and that this machine reaches it, or unset "
            "RAY_ADDRESS to train here.",
        ) from error
    if not is_grpc:
        raise ClusterError(
            problem=f"What listens at RAY_ADDRESS={address} is not a Ray head.",
            way_out="Set RAY_ADDRESS to the head's host:port (6379 by default; 8265 is its "
            "dashboard), or unset it to train here.",
        )


def _speaks_http2(peer: socket.socket) -> bool:
    peer.sendall(_HTTP2_HELLO)
    try:
        header = peer.recv(9)
    except TimeoutError:
        return False
    return len(header) == 9 and header[3] == _HTTP2_SETTINGS


@contextmanager
def connected(
    address: str | None, *, start_timeout_s: float, with_output: bool = True
) -> Iterator[None]:
    """Join the cluster at ``address``, or run one on this machine for as long as this lasts.

    Ray Train is imported while Ray's own processes start. A worker group that is started again may
    wait for its nodes as long as the first.

    Args:
        address: From ``cluster_address``.
        start_timeout_s: How long nodes may take to come.
        with_output: Whether what workers print is printed here.

    Raises:
        ClusterError: The cluster cannot be joined.
    """
    use_token_authentication()
    if address is not None and address != "auto":
        check_reachable(address)
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(start_timeout_s))
    defaults = _RAY_DEFAULTS | (_JOIN_DEFAULTS if address is not None else {})
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    import ray
    from ray.exceptions import RayError

    importer = threading.Thread(target=_import_train, daemon=True)
    importer.start()
    with tempfile.TemporaryDirectory(
        prefix="rd-", dir=short_folder(), ignore_cleanup_errors=True
    ) as folder:
        try:
            if address is None:
                # The driver's workers are started on demand: none are started to wait.
                os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                ray.init(
                    address="local",
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                    log_to_driver=with_output,
                    _temp_dir=folder,
                )
            else:
                ray.init(address=address, logging_level=logging.ERROR, log_to_driver=with_output)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            raise ClusterError(
                problem=f"The Ray cluster at {address or 'this machine'} cannot be joined: "
                f"{str(error).splitlines()[0]}",
                way_out="Check RAY_ADDRESS, RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH.",
            ) from error
        try:
            importer.join()
            yield
        finally:
            ray.shutdown()


def view() -> ClusterView:
    """Return what the connected cluster has and could have."""
    import ray
    from ray._private.state import state

    total = ray.cluster_resources()
    config = state.get_cluster_config()
    types = [
        NodeType(
            resources=dict(group.resources),
            max_count=math.inf if group.max_count < 0 else group.max_count,
        )
        for group in (config.node_group_configs if config else ())
    ]
    limits = state.get_max_resources_from_cluster_config() or {}
    could = {name: max(total.get(name, 0), limits.get(name, 0)) for name in total | limits}
    nodes = [
        NodeView(
            node_id=node["NodeID"],
            name=node["NodeManagerHostname"],
            address=node["NodeManagerAddress"],
            resources=node["Resources"],
            labels=node.get("Labels") or {},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return ClusterView(
        total=total,
        free=ray.available_resources(),
        could_scale_to=could,
        nodes=nodes,
        node_types=types,
    )


def short_folder() -> str | None:
    """Return where Ray's directory may be made, None for the usual place.

    Ray puts unix sockets below it, whose paths have 107 bytes at most.
    """
    return None if len(tempfile.gettempdir()) <= 30 else "/tmp"


def session_folder() -> str:
    """Return where this node's Ray keeps its own files.

    Raises:
        ClusterError: This process is not connected to Ray.
    """
    import ray._private.worker

    node = ray._private.worker._global_node
    if node is None:
        raise ClusterError(problem="This process is not connected to Ray.")
    return node.get_session_dir_path()


def _import_train() -> None:
    import raydist.launch.trainer  # noqa: F401
