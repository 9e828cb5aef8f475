# SPDX-License-Identifier: Apache-2.0
"""Reads the rows of every attempt back, and folds them into one row per step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from raydist.errors import StorageError
from raydist.metrics.rows import METRICS_PREFIX, decode_row, parse_segment_key
from raydist.storage.store import ObjectStore

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """All rows that a run has left."""

    rows: list[Row]
    """Sorted by (attempt, step)."""
    num_torn_lines: int
    """Segments whose last line was cut short, by a kill or because it is being written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedHistory:
    """One row per step."""

    rows: list[Row]
    """Sorted by step; of a step done twice, the row of the newest attempt."""
    repeated_steps: list[int]
    """Steps that more than one attempt has done, sorted."""


def read_history(store: ObjectStore) -> History:
    """Read every attempt's rows.

    Args:
        store: Rooted at the run.

    Raises:
        StorageError: The store failed, or a line that is not its segment's last is no row.
    """
    segments = {key: parse_segment_key(key) for key, _ in store.list(METRICS_PREFIX)}
    in_order = sorted((place, key) for key, place in segments.items() if place is not None)
    rows: list[Row] = []
    num_torn_lines = 0
    for _, key in in_order:
        segment_rows, is_torn = _read_segment(store, key)
        rows += segment_rows
        num_torn_lines += is_torn
    rows.sort(key=_row_key)
    return History(rows=_drop_copies(rows), num_torn_lines=num_torn_lines)


def _read_segment(store: ObjectStore, key: str) -> tuple[list[Row], bool]:
    lines = store.get(key).rstrip(b"\n").split(b"\n")
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        row = decode_row(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise StorageError(
                problem=f"{key} line {number} of {len(lines)} is no metrics row.",
                way_out="Only a last line may be cut short; remove the line to read the rest.",
            )
        else:
            return rows, bool(line)
    return rows, False


def _drop_copies(rows: list[Row]) -> list[Row]:
    """Drop rows that an append stored although it reported a failure, and then stored again."""
    kept: list[Row] = []
    for _, group in itertools.groupby(rows, key=_row_key):
        of_one_step: list[Row] = []
        for row in group:
            if row not in of_one_step:
                of_one_step.append(row)
        kept += of_one_step
    return kept


def _row_key(row: Row) -> tuple[int, int]:
    return row["attempt"], row["step"]


def merge(rows: Iterable[Row]) -> MergedHistory:
    """Fold the attempts into one row per step: the newest attempt's, a later row before an earlier.

    Args:
        rows: In any order of attempts.
    """
    newest: dict[int, Row] = {}
    repeated: set[int] = set()
    for row in rows:
        seen = newest.get(row["step"])
        if seen is not None and seen["attempt"] != row["attempt"]:
            repeated.add(row["step"])
        if seen is None or row["attempt"] >= seen["attempt"]:
            newest[row["step"]] = row
    merged = [newest[step] for step in sorted(newest)]
    return MergedHistory(rows=merged, repeated_steps=sorted(repeated))
