# SPDX-License-Identifier: Apache-2.0
"""From the facts of all nodes to findings. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raydist.doctor.facts import NodeFacts, RankCollectives
from raydist.doctor.finding import Finding, in_order, label_nodes
from raydist.doctor.gpus import examine_gpus
from raydist.doctor.hosts import examine_hosts
from raydist.doctor.links import Pair, examine_links
from raydist.doctor.services import examine_collectives, examine_storage
from raydist.doctor.software import examine_software


def examine(
    nodes: Sequence[NodeFacts],
    *,
    silent: Mapping[str, str] | None = None,
    rates: Mapping[Pair, float | None] | None = None,
    ranks: Sequence[RankCollectives] = (),
) -> list[Finding]:
    """Return what is wrong with ``nodes`` together: failures, then warnings, then notes.

    Args:
        nodes: Facts of every node that answered.
        silent: Nodes that did not, and why.
        rates: Between nodes in bytes per second, of both rounds of pairs.
        ranks: What each rank saw of the collectives.
    """
    labelled = label_nodes(nodes)
    findings = [
        Finding(
            severity="failure",
            check="node",
            where=(node,),
            what=f"The node does not answer: {reason}",
            why="A rank placed there would not start, and all others would wait for it.",
            what_to_do=f"Restart it, or leave it out with --exclude {node}.",
        )
        for node, reason in (silent or {}).items()
    ]
    findings += examine_software(labelled)
    findings += examine_gpus(labelled)
    findings += examine_hosts(labelled)
    findings += examine_links(rates or {})
    findings += examine_storage(labelled)
    findings += examine_collectives(ranks, labelled)
    return in_order(findings)
