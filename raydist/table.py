# SPDX-License-Identifier: Apache-2.0
"""Rows as aligned columns, readable in a log."""

from __future__ import annotations

from collections.abc import Sequence


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return headings and rows with columns two spaces apart."""
    widths = [max(len(row[i]) for row in (headings, *rows)) for i in range(len(headings))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (headings, *rows)
    )
