# SPDX-License-Identifier: Apache-2.0
"""Is this cluster fit to train? Facts of each node, findings over all of them, a verdict."""

from raydist.doctor.facts import NodeFacts, RankCollectives, StorageFacts
from raydist.doctor.finding import Finding
from raydist.doctor.findings import examine
from raydist.doctor.report import UNFIT_EXIT_CODE, DoctorReport, render

__all__ = [
    "UNFIT_EXIT_CODE",
    "DoctorReport",
    "Finding",
    "NodeFacts",
    "RankCollectives",
    "StorageFacts",
    "examine",
    "render",
]
