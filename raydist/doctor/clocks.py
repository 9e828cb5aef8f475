# SPDX-License-Identifier: Apache-2.0
"""How far another machine's clock is from this one's: four stamps of one question. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raydist.clock import Clock
from raydist.doctor.facts import ClockOffset


def clock_offset(
    *, asked_s: float, received_s: float, replied_s: float, answered_s: float
) -> ClockOffset:
    """Return a clock's offset from the stamps of one question, all in seconds of their clocks.

    Args:
        asked_s: The asker's clock when it asked.
        received_s: The node's clock when the question came.
        replied_s: The node's clock when it replied.
        answered_s: The asker's clock when the answer came.

    Source: RFC 5905, "Network Time Protocol Version 4", section 8.
    """
    return ClockOffset(
        offset_s=((received_s - asked_s) + (replied_s - answered_s)) / 2,
        round_trip_s=max(0.0, (answered_s - asked_s) - (replied_s - received_s)),
    )


def best_offset(offsets: Sequence[ClockOffset]) -> ClockOffset:
    """Return the offset that is known most exactly: the one with the shortest round trip."""
    return min(offsets, key=lambda one: one.round_trip_s)


def measure_offset(
    ask: Callable[[], tuple[float, float]], *, clock: Clock, num_questions: int = 3
) -> ClockOffset:
    """Ask a node for its time and return how far it is ahead of ``clock``.

    Args:
        ask: Returns the node's clock when the question came and when it replied.
        clock: The asker's.
        num_questions: The first carries the start of a connection; the best one counts.
    """
    offsets = []
    for _ in range(num_questions):
        asked_s = clock.now_unix_s()
        received_s, replied_s = ask()
        offsets.append(
            clock_offset(
                asked_s=asked_s,
                received_s=received_s,
                replied_s=replied_s,
                answered_s=clock.now_unix_s(),
            )
        )
    return best_offset(offsets)
