# SPDX-License-Identifier: Apache-2.0
"""Learning rate as a pure function of optimizer steps taken."""

from __future__ import annotations

import math

from raydist.config import RunConfig


def learning_rate(config: RunConfig, *, updates: int) -> float:
    """Return the rate of the next update after ``updates`` updates were taken.

    Linear warm-up from peak / warmup_steps, then cosine, linear or constant to the floor at
    ``config.decay_steps``, and the floor after it. World size and accumulation play no part;
    a skipped step is not an update.

    Source: cosine decay as in Loshchilov and Hutter, arXiv 1608.03983, without restarts.
    """
    optimizer = config.optimizer
    peak, warmup = optimizer.learning_rate, optimizer.warmup_steps
    if updates < warmup:
        return peak * (updates + 1) / warmup
    if optimizer.schedule == "constant":
        return peak
    span = max(1, config.decay_steps - warmup)
    done = min(1.0, (updates - warmup) / span)
    remaining = 1 - done if optimizer.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    floor = optimizer.min_learning_rate_ratio
    return peak * (floor + (1 - floor) * remaining)
