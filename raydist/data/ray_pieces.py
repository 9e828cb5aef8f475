# SPDX-License-Identifier: Apache-2.0
"""Corpus preparation spread over the cluster by Ray Data."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from raydist.data.corpus import CorpusPart
from raydist.data.prepare import Piece, SourceFile


def map_with_ray_data(
    function: Callable[[Piece, str], CorpusPart], pieces: list[Piece], url: str
) -> list[CorpusPart]:
    """Map over pieces as Ray Data tasks, one a piece; parts come back in piece order."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)

    def one(row: dict[str, Any]) -> dict[str, Any]:
        piece = row["item"]
        files = tuple(SourceFile(**file) for file in piece["files"])
        part = function(Piece(index=piece["index"], files=files), url)
        return {"index": piece["index"], **asdict(part)}

    items = [asdict(piece) for piece in pieces]
    rows = ray.data.from_items(items, override_num_blocks=len(items)).map(one).take_all()
    rows.sort(key=lambda row: row.pop("index"))
    return [CorpusPart(**row) for row in rows]
