# SPDX-License-Identifier: Apache-2.0
"""One small actor on every node, to ask it things without reserving anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydist.errors import ClusterError, RaydistError
from raydist.launch.cluster_view import NodeView


class _Agent:
    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what ``function`` returns on this node."""
        return function(*arguments)


class NodeAgents:
    """Calls functions on one process of each node; an ``OnNodes``."""

    def __init__(self, nodes: Sequence[NodeView], *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.nodes = {node.node_id: node for node in nodes}
        agent: Any = ray.remote(num_cpus=0, max_restarts=0)(_Agent)
        self._agents = {
            node_id: agent.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
            ).remote()
            for node_id in self.nodes
        }

    def __call__(
        self, function: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]], /
    ) -> dict[str, Any]:
        """Return every node's result.

        Raises:
            ClusterError: A node did not answer, or raised; names it. A RaydistError stays itself.
        """
        results, failures = self.gather(function, arguments)
        for node_id, error in failures.items():
            if isinstance(error, RaydistError):
                raise error
            raise ClusterError(
                problem=f"Node {self.nodes[node_id].name} ({self.nodes[node_id].address}): "
                f"{describe_failure(error, self._timeout_s)}",
                way_out="Look into Ray's logs there, or leave the node out.",
            ) from error
        return results

    def gather(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, tuple[Any, ...]],
        *,
        timeout_s: float | None = None,
    ) -> tuple[dict[str, Any], dict[str, Exception]]:
        """Return the results of the nodes that answered in time, and what the others failed with.

        All share one time limit: ``timeout_s``, or that of the agents.
        """
        calls = {
            node: self._agents[node].call.remote(function, *each)
            for node, each in arguments.items()
        }
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s or self._timeout_s)
        results: dict[str, Any] = {}
        failures: dict[str, Exception] = {}
        for node, call in calls.items():
            try:
                results[node] = ray.get(call, timeout=0.1)
            except RayTaskError as error:
                cause = error.cause
                failures[node] = cause if isinstance(cause, Exception) else error
            except RayError as error:
                failures[node] = error
        return results, failures

    def drop(self, node_ids: Iterable[str]) -> None:
        """Ask these nodes nothing more."""
        for node_id in list(node_ids):
            del self.nodes[node_id]
            ray.kill(self._agents.pop(node_id))

    def close(self) -> None:
        """End the actors."""
        for agent in self._agents.values():
            ray.kill(agent)


def describe_failure(error: Exception, timeout_s: float) -> str:
    """Return in one line why a node gave no result."""
    if isinstance(error, GetTimeoutError):
        return f"no answer within {timeout_s:g} s"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


@contextmanager
def node_agents(nodes: Sequence[NodeView], *, timeout_s: float) -> Iterator[NodeAgents]:
    """Have an actor on each node for as long as this lasts.

    Args:
        nodes: Where.
        timeout_s: How long nodes may take for one call, starting their actor included.
    """
    agents = NodeAgents(nodes, timeout_s=timeout_s)
    try:
        yield agents
    finally:
        agents.close()
