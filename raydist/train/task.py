# SPDX-License-Identifier: Apache-2.0
"""What the driver hands to every rank. No torch: the driver only passes it on."""

from __future__ import annotations

from dataclasses import dataclass

from raydist.config import RunConfig
from raydist.train.job import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTask:
    """What every rank is told besides its place.

    Fields:
        driver: Identity of the submission; attempts of one driver replace each other.
        takeover: Whether a living attempt of another driver is replaced too.
        corpus_url: The prepared corpus.
    """

    job: Job
    config: RunConfig
    driver: str
    takeover: bool
    corpus_url: str
