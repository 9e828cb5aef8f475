# SPDX-License-Identifier: Apache-2.0
"""Local clusters of several nodes, for all tests here. Nothing is faked but the wires."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from node_jobs import NodeJobs

from raydist.testing.local_cluster import LocalCluster
from raydist.testing.local_node import LocalNode
from raydist.testing.network_namespaces import requirements_missing

ClusterMaker = Callable[..., LocalCluster]


@pytest.fixture(scope="session", autouse=True)
def _can_hold_clusters() -> None:
    """Skip where there can be no cluster; a machine with root is expected to hold one."""
    missing = requirements_missing()
    if missing and sys.platform.startswith("linux") and os.geteuid() == 0:
        pytest.fail(missing, pytrace=False)
    if missing:
        pytest.skip(missing)


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(3, folder=tmp_path_factory.mktemp("cluster3")) as cluster:
        yield cluster


@pytest.fixture
def cluster3(shared_cluster: LocalCluster) -> Iterator[LocalCluster]:
    """Three nodes that a module's tests share: links heal after each, nodes are not killed."""
    yield shared_cluster
    for node in shared_cluster.nodes:
        assert node.is_alive, "a test that kills a node makes a cluster of its own"
        shared_cluster.restore_link(node.plan.number)


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[ClusterMaker]:
    """Start clusters of a test's own, by LocalCluster's arguments."""
    with ExitStack() as ending:

        def make(num_nodes: int, **options: Any) -> LocalCluster:
            options.setdefault("folder", tmp_path)
            return ending.enter_context(LocalCluster(num_nodes, **options))

        yield make


@pytest.fixture
def jobs_on(tmp_path: Path) -> Callable[[LocalNode], NodeJobs]:
    """Run tiny jobs whose driver is on a node, over one corpus and one storage directory."""
    return lambda node: NodeJobs(tmp_path, node)
