# SPDX-License-Identifier: Apache-2.0
"""One finding of a doctor, and the order they are shown in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from raydist.doctor.facts import NodeFacts

Severity = Literal["failure", "warning", "note"]

_ORDER: tuple[Severity, ...] = ("failure", "warning", "note")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that a doctor noticed.

    Fields:
        severity: A failure makes the nodes unfit to train; a warning costs speed or is a risk; a
            note explains a difference.
        check: What was looked at, in one or two words.
        where: Names of the nodes.
        what: One sentence with the numbers.
        why: Why it matters to training.
        what_to_do: The way out.
    """

    severity: Severity
    check: str
    where: tuple[str, ...]
    what: str
    why: str
    what_to_do: str

    def to_json_dict(self) -> dict[str, Any]:
        """Return the finding as JSON's own types."""
        return asdict(self)


def label_names(names: Mapping[str, str]) -> dict[str, str]:
    """Return by node id a name that tells nodes apart; two Ray nodes may share a host.

    Args:
        names: Host names by node id.
    """
    count = Counter(names.values())
    return {
        node_id: name if count[name] == 1 else f"{name} ({node_id[:8]})"
        for node_id, name in names.items()
    }


def label_nodes(nodes: Sequence[NodeFacts]) -> dict[str, NodeFacts]:
    """Return the nodes by a name that tells them apart."""
    labels = label_names({facts.node_id: facts.node for facts in nodes})
    return {labels[facts.node_id]: facts for facts in nodes}


def join_words(words: Iterable[str]) -> str:
    """Return the words as a text says them: a, b and c."""
    listed = list(words)
    if len(listed) < 2:
        return "".join(listed)
    return f"{', '.join(listed[:-1])} and {listed[-1]}"


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Return failures, then warnings, then notes; what is said of several nodes is said once."""
    merged: dict[Finding, Finding] = {}
    for finding in findings:
        same = replace(finding, where=())
        before = merged.get(same)
        where = (*before.where, *finding.where) if before else finding.where
        merged[same] = replace(finding, where=tuple(dict.fromkeys(where)))
    return sorted(merged.values(), key=lambda f: _ORDER.index(f.severity))
