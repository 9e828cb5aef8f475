# SPDX-License-Identifier: Apache-2.0
"""Corpus preparation spread over the cluster by Ray Data."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from raydist.data.corpus import CorpusPart
from raydist.data.prepare import Piece, SourceFile
from raydist.errors import RaydistError


def map_with_ray_data(
    function: Callable[[Piece, str], CorpusPart], pieces: list[Piece], url: str
) -> list[CorpusPart]:
    """Map over pieces as Ray Data tasks, one a piece; parts come back in piece order.

    The tasks reserve no CPU: the ranks, which are still starting, may hold all there are.

    Raises:
        RaydistError: As ``function`` raised it for the first piece that failed.
    """
    import ray
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)

    def one(row: dict[str, Any]) -> dict[str, Any]:
        files = tuple(SourceFile(**file) for file in row["files"])
        try:
            part = function(Piece(index=row["index"], files=files), url)
        except RaydistError as error:  # Ray Data would keep its text only.
            return {"index": row["index"], "failed": pickle.dumps(error)}
        return {"index": row["index"], **asdict(part)}

    items = [asdict(piece) for piece in pieces]
    cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
    at_once = ray.data.TaskPoolStrategy(size=min(cpus, len(items)))
    rows = (
        ray.data.from_items(items, override_num_blocks=len(items))
        .map(one, compute=at_once, num_cpus=0)
        .take_all()
    )
    rows.sort(key=lambda row: row.pop("index"))
    failed = next((row["failed"] for row in rows if "failed" in row), None)
    if failed is not None:
        error: RaydistError = pickle.loads(failed)
        raise error
    return [CorpusPart(**row) for row in rows]
