# SPDX-License-Identifier: Apache-2.0
"""The doctor's verdict as a table for people and as JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raydist.doctor.facts import NodeFacts, RankCollectives
from raydist.doctor.finding import Finding, join_words, label_nodes
from raydist.doctor.links import Pair
from raydist.table import table

GIB, MB = 1 << 30, 1_000_000

UNFIT_EXIT_CODE = 1
"""A cluster that is not fit. The codes from 2 up are errors.FailureKind: the question itself
could not be asked, or its asker was interrupted."""

_WIDTH = 98


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorReport:
    """What was looked at and what was found.

    Fields:
        rates: Between nodes in bytes per second; None for a pair that did not connect.
        excluded: Nodes that were left out because the user said so.
        network: What was chosen of the network, in lines.
        seconds: How long it took.
    """

    nodes: tuple[NodeFacts, ...]
    findings: tuple[Finding, ...]
    rates: Mapping[Pair, float | None] = field(default_factory=dict)
    ranks: tuple[RankCollectives, ...] = ()
    excluded: tuple[str, ...] = ()
    network: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def failures(self) -> tuple[Finding, ...]:
        """Findings for which the cluster is not fit."""
        return tuple(f for f in self.findings if f.severity == "failure")

    @property
    def is_fit(self) -> bool:
        """Whether the nodes are fit to train."""
        return not self.failures and bool(self.nodes)

    @property
    def exit_code(self) -> int:
        """0 when fit, else ``UNFIT_EXIT_CODE``."""
        return 0 if self.is_fit else UNFIT_EXIT_CODE

    @property
    def verdict(self) -> str:
        """One line: whether it is fit, and the nodes for which it is not."""
        if self.is_fit:
            return "fit to train: yes"
        if not self.nodes and not self.failures:
            return "fit to train: no (no node answered)"
        nodes = dict.fromkeys(node for f in self.failures for node in f.where)
        return f"fit to train: no ({join_words(nodes) or 'see the failures'})"

    def to_json_dict(self) -> dict[str, Any]:
        """Return the report as JSON's own types."""
        return {
            "is_fit": self.is_fit,
            "seconds": round(self.seconds, 3),
            "excluded": list(self.excluded),
            "network": list(self.network),
            "findings": [finding.to_json_dict() for finding in self.findings],
            "nodes": [facts.to_json_dict() for facts in self.nodes],
            "links": [
                {"nodes": list(pair), "bytes_per_s": rate} for pair, rate in self.rates.items()
            ],
            "collectives": [rank.to_json_dict() for rank in self.ranks],
        }


def render(report: DoctorReport) -> str:
    """Return the report as plain text: nodes, what they share, findings, verdict."""
    lines = _lines(
        ("node", "address", "GPUs", "CPUs", "memory", "/dev/shm", "clock", "storage up / down"),
        [_node_row(label, facts) for label, facts in label_nodes(report.nodes).items()],
    )
    if report.network:
        lines += ["", *report.network]
    if report.rates:
        lines += ["", *_lines(("link", "rate"), [_link_row(p, r) for p, r in report.rates.items()])]
    lines += _collective_lines(report.ranks)
    if report.excluded:
        lines += ["", f"left out: {', '.join(report.excluded)}"]
    for finding in report.findings:
        lines += ["", *_finding_lines(finding)]
    count = Counter(finding.severity for finding in report.findings)
    counts = ", ".join(_count(count[name], name) for name in ("failure", "warning", "note"))
    nodes = _count(len(report.nodes), "node")
    lines += ["", f"{nodes} in {report.seconds:.1f} s: {counts}", report.verdict]
    return "\n".join(lines)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _node_row(label: str, facts: NodeFacts) -> tuple[str, ...]:
    models = Counter(gpu.name for gpu in facts.gpus)
    memory, storage = facts.memory, facts.storage
    shm = memory.shm_total_bytes
    rates = ""
    if storage is not None:
        rates = f"fails: {storage.failed_step}"
        if storage.failed_step is None:
            ways = (storage.upload_bytes_per_s, storage.download_bytes_per_s)
            rates = " / ".join(_rate(rate) for rate in ways)
    return (
        label,
        facts.address,
        ", ".join(f"{count} x {name}" for name, count in models.items()) or "-",
        f"{facts.num_cpus:g}",
        f"{memory.usable_bytes / GIB:.0f} GiB",
        "-" if shm is None else f"{shm / GIB:.2g} GiB",
        "-" if facts.clock is None else f"{facts.clock.offset_s:+.3f} s",
        rates or "-",
    )


def _link_row(pair: Pair, rate: float | None) -> tuple[str, str]:
    return f"{pair[0]} - {pair[1]}", "no connection" if rate is None else _rate(rate)


def _rate(rate: float | None) -> str:
    return "?" if rate is None else f"{rate / MB:,.0f} MB/s"


def _collective_lines(ranks: Sequence[RankCollectives]) -> list[str]:
    if not ranks:
        return []
    checks = [check for rank in ranks for check in rank.checks]
    right = sum(check.is_right is True for check in checks)
    offered = sum(check.is_right is not None for check in checks)
    where = f"{ranks[0].backend} on {_count(len(ranks), 'rank')}"
    text = f"collectives over {where}: {right} of {offered} right"
    speed = ranks[0].all_reduce
    if speed is not None:
        text += (
            f"; all-reduce of {speed.num_bytes / 2**20:.3g} MiB at {_rate(speed.bus_bytes_per_s)} "
            f"bus bandwidth, of one element in {speed.latency_s * 1e6:,.0f} us"
        )
    return ["", *textwrap.wrap(text, _WIDTH)]


def _lines(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    return table(headings, rows).splitlines()


def _finding_lines(finding: Finding) -> list[str]:
    where = f" on {', '.join(finding.where)}" if finding.where else ""
    lines = [f"{finding.severity.upper()} {finding.check}{where}"]
    for text in (finding.what, finding.why, finding.what_to_do):
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False
        )
    return lines
