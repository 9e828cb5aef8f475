# SPDX-License-Identifier: Apache-2.0
"""Which nodes a Ray label selector admits. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Return whether a node with ``labels`` is admitted.

    A value is `x`, `!x`, `in(x,y)` or `!in(x,y)`; a label that is not there equals nothing.

    Source: Ray's documentation, "Use labels to control scheduling".
    """
    return all(_admits(wanted, labels.get(key)) for key, wanted in selector.items())


def _admits(wanted: str, value: str | None) -> bool:
    is_negative, wanted = wanted.startswith("!"), wanted.removeprefix("!")
    if wanted.startswith("in(") and wanted.endswith(")"):
        accepted = [part.strip() for part in wanted[3:-1].split(",")]
    else:
        accepted = [wanted]
    return (value in accepted) != is_negative
