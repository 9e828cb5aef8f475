# SPDX-License-Identifier: Apache-2.0
"""One line per rank at the start: where it is and how it talks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from raydist.network import ImpliedEnvironment, NodeChoice
from raydist.world import World


def rank_facts(
    world: World,
    choice: NodeChoice,
    implied: ImpliedEnvironment,
    *,
    device: str,
    num_threads: int,
) -> dict[str, Any]:
    """Return what this process knows of its place, as plain data."""
    return {
        "rank": world.rank,
        "host": choice.node,
        "pid": os.getpid(),
        "device": device,
        "threads": num_threads,
        "interface": choice.interface,
        "address": choice.address,
        "reason": choice.short_source,
        "notes": [
            *(f"{key}={value} is kept from the node" for key, value in implied.kept.items()),
            *implied.warnings,
        ],
    }


def describe_ranks(facts: Sequence[dict[str, Any]]) -> list[str]:
    """Return one line per rank, and what is odd about a node once."""
    lines = [
        "rank {rank}: {host} (pid {pid}), {device}, {threads} threads, {interface} {address} "
        "({reason})".format(**fact)
        for fact in facts
    ]
    notes = {f"{fact['host']}: {note}": None for fact in facts for note in fact["notes"]}
    return lines + list(notes)
