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
        seen_attempt: The run's newest attempt when the driver was allowed to start, 0 for none.
        takeover: Whether that attempt may be alive.
        allow_config_change: Whether the corpus may differ from the one the run began with.
        corpus_url: The prepared corpus.
        revision: Of the job's sources, for run.json.
    """

    job: Job
    config: RunConfig
    driver: str
    seen_attempt: int
    takeover: bool
    allow_config_change: bool
    corpus_url: str
    revision: str
