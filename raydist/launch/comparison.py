# SPDX-License-Identifier: Apache-2.0
"""Comparing the nodes of a worker group before it trains: seconds now for hours later."""

from __future__ import annotations

from collections.abc import Mapping

from raydist.doctor import Finding, NodeFacts, examine
from raydist.errors import ClusterError
from raydist.launch.doctor_node import describe_machine
from raydist.launch.ray_network import OnNodes


def compare_nodes(on_nodes: OnNodes, addresses: Mapping[str, str]) -> list[str]:
    """Look at every node; refuse those that cannot train together.

    Args:
        on_nodes: Reaches the nodes.
        addresses: The cluster's address of each node, by node id.

    Returns:
        Warnings, a line each.

    Raises:
        ClusterError: A node is not fit, or two differ in what they must agree on; names them.
    """
    facts: dict[str, NodeFacts] = on_nodes(
        describe_machine, {node: (node, address) for node, address in addresses.items()}
    )
    findings = examine(list(facts.values()))
    failures = [f for f in findings if f.severity == "failure"]
    if failures:
        raise ClusterError(
            problem="Not fit to train: " + "; ".join(map(_sentence, failures)),
            way_out=f"{failures[0].what_to_do} `raydist doctor` tells more; "
            "--scaling.no-preflight trains regardless.",
        )
    return [
        f"preflight warning: {_sentence(f)} {f.what_to_do}"
        for f in findings
        if f.severity == "warning"
    ]


def _sentence(finding: Finding) -> str:
    where = f" ({', '.join(finding.where)})" if finding.where else ""
    return f"{finding.check}{where}: {finding.what}"
