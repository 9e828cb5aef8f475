# SPDX-License-Identifier: Apache-2.0
"""What a cluster has, as plain data, and parts of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from raydist.errors import ConfigError

_MIN_ID_CHARACTERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeView:
    """One living node: who it is and what it has in all, busy or free."""

    node_id: str = ""
    name: str = ""
    address: str = ""
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    def is_called(self, name: str) -> bool:
        """Whether a user means this node: by name, address, Ray node id or the start of one."""
        is_start = len(name) >= _MIN_ID_CHARACTERS and self.node_id.startswith(name)
        return name in (self.name, self.address, self.node_id) or is_start


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeType:
    """A kind of node that the autoscaler adds, and how many there can be at once."""

    resources: Mapping[str, float]
    max_count: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterView:
    """What a cluster has: resources in all, free now, at most with its autoscaler, and by node."""

    total: Mapping[str, float]
    free: Mapping[str, float]
    could_scale_to: Mapping[str, float]
    nodes: Sequence[NodeView]
    node_types: Sequence[NodeType] = ()


def without_excluded(names: Sequence[str], view: ClusterView) -> tuple[ClusterView, list[str]]:
    """Leave out nodes by name, address or node id; also return their node ids.

    Raises:
        ConfigError: A name that no node has.
    """
    excluded: list[NodeView] = []
    for name in names:
        found = [n for n in view.nodes if n.is_called(name)]
        if not found:
            known = ", ".join(sorted(f"{n.name} ({n.address})" for n in view.nodes))
            raise ConfigError(
                problem=f"No node to exclude is called {name!r}; there are {known}.",
                way_out="Give a node's name, address or Ray node id.",
            )
        excluded += found
    ids = list(dict.fromkeys(n.node_id for n in excluded))
    return restricted(view, lambda node: node.node_id not in ids), ids


def restricted(view: ClusterView, keep: Callable[[NodeView], bool]) -> ClusterView:
    """Return the view without the nodes that ``keep`` refuses, and without their resources."""
    gone: Counter[str] = Counter()
    for node in view.nodes:
        if not keep(node):
            gone.update(node.resources)
    if not gone:
        return view

    def less(amounts: Mapping[str, float]) -> dict[str, float]:
        return {k: max(0.0, v - gone.get(k, 0)) for k, v in amounts.items()}

    return replace(
        view,
        total=less(view.total),
        free=less(view.free),
        could_scale_to=less(view.could_scale_to),
        nodes=[node for node in view.nodes if keep(node)],
    )
