# SPDX-License-Identifier: Apache-2.0
"""Comparing the nodes of a worker group before it trains: seconds now for hours later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from raydist.doctor import Finding, NodeFacts, examine
from raydist.errors import ClusterError
from raydist.launch.doctor_node import describe_machine
from raydist.launch.ray_network import OnNodes


def compare_nodes(
    on_nodes: OnNodes, addresses: Mapping[str, str], gpus: Mapping[str, Sequence[str]]
) -> list[str]:
    """Look at every node; refuse those that cannot train together.

    Args:
        on_nodes: Reaches the nodes.
        addresses: The cluster's address of each node, by node id.
        gpus: The GPUs that the run has of each node; its neighbours' are not its concern.

    Returns:
        Warnings, a line each.

    Raises:
        ClusterError: A node is not fit, or two differ in what they must agree on; names them.
    """
    facts: dict[str, NodeFacts] = on_nodes(
        describe_machine, {node: (node, address) for node, address in addresses.items()}
    )
    findings = examine([_with_gpus(facts[node], gpus[node]) for node in facts])
    # A full disk stops Ray from spilling and nothing else: no reason to refuse.
    failures = [f for f in findings if f.severity == "failure" and f.check != "disk"]
    if failures:
        raise ClusterError(
            problem="Not fit to train: " + "; ".join(map(_sentence, failures)),
            way_out=f"{failures[0].what_to_do} `raydist doctor` tells more; "
            "--scaling.no-preflight trains regardless.",
        )
    return [
        f"preflight warning: {_sentence(f)} {f.what_to_do}"
        for f in findings
        if f.severity == "warning" or f.check == "disk"
    ]


def _with_gpus(facts: NodeFacts, gpus: Sequence[str]) -> NodeFacts:
    return replace(
        facts, gpus=tuple(gpu for gpu in facts.gpus if str(gpu.index) in gpus or gpu.uuid in gpus)
    )


def _sentence(finding: Finding) -> str:
    where = f" ({', '.join(finding.where)})" if finding.where else ""
    return f"{finding.check}{where}: {finding.what}"
