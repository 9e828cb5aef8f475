# SPDX-License-Identifier: Apache-2.0
"""Which failures deserve another attempt, and when: a pure schedule, and the loop that keeps it."""

from __future__ import annotations

import enum
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from raydist.clock import Clock
from raydist.errors import ConfigError

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How often and how long one operation is tried."""

    max_attempts: int = 10
    """Attempts in all, the first included."""
    base_delay_s: float = 0.25
    """Longest wait before the second attempt; doubles from there."""
    max_delay_s: float = 20.0
    """Longest wait before any attempt."""
    total_limit_s: float = 120.0
    """No attempt starts later than this after the first one started."""

    def __post_init__(self) -> None:
        numbers = (self.base_delay_s, self.max_delay_s, self.total_limit_s)
        if self.max_attempts < 1 or min(numbers) < 0:
            raise ConfigError(
                problem=f"{self} cannot be kept.",
                way_out="max_attempts is at least 1 and no duration is negative.",
            )


def delays(policy: RetryPolicy, rng: random.Random) -> Iterator[float]:
    """Yield the wait before each attempt after the first: ``max_attempts - 1`` of them.

    Full jitter: uniform in [0, min(max_delay_s, base_delay_s * 2^n)], so that ranks which failed
    together do not come back together.

    Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """
    for attempt in range(policy.max_attempts - 1):
        ceiling_s = min(policy.max_delay_s, policy.base_delay_s * 2.0 ** min(attempt, 60))
        yield rng.uniform(0.0, ceiling_s)


class Breakage(enum.Enum):
    """How far a failed request got."""

    ANSWERED = "answered"
    """The server replied, with an error."""
    UNREACHED = "unreached"
    """No connection, or no fresh credentials: the request was never sent."""
    CUT = "cut"
    """Sent, but the reply is missing, late, short or garbled: it may have taken effect."""
    REFUSED_HERE = "refused here"
    """Never sent and never will be: no credentials, a parameter the SDK refuses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestFailure:
    """One failed request as plain data."""

    breakage: Breakage
    http_status: int | None = None
    code: str = ""
    """The service's own word, such as ``SlowDown``; empty when it did not answer."""

    @property
    def may_have_happened(self) -> bool:
        """Whether the server may have done what was asked although it looks failed."""
        if self.breakage is Breakage.ANSWERED:
            return self.http_status is None or self.http_status >= 500
        return self.breakage is Breakage.CUT


_RETRYABLE_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_RETRYABLE_CODES = frozenset(
    {
        "BadDigest",
        "ConditionalRequestConflict",
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "PriorRequestNotComplete",
        "RequestThrottled",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "XAmzContentSHA256Mismatch",
    }
)
"""Worth another attempt whatever their status; the digests mean bytes damaged on the way.

Source: the S3 API reference, "Error responses"; botocore/retries/standard.py."""


def is_retryable(failure: RequestFailure) -> bool:
    """Whether the same request may succeed later without anyone changing anything."""
    if failure.breakage is Breakage.ANSWERED:
        return failure.code in _RETRYABLE_CODES or failure.http_status in _RETRYABLE_STATUSES
    return failure.breakage in (Breakage.UNREACHED, Breakage.CUT)


def call_with_retry(
    fn: Callable[[], T],
    *,
    policy: RetryPolicy,
    clock: Clock,
    rng: random.Random,
    classify: Callable[[Exception], bool],
) -> T:
    """Call ``fn`` until it returns, fails for good, or the policy is spent.

    Args:
        fn: One attempt; called again from the start each time.
        policy: How often and how long.
        clock: Time, for limits and waits.
        rng: Jitter.
        classify: Whether an exception out of ``fn`` deserves another attempt.

    Returns:
        What ``fn`` returned.

    Raises:
        Exception: The last one out of ``fn``, unchanged.
    """
    started_s = clock.monotonic_s()
    for attempt, delay_s in enumerate(delays(policy, rng), start=1):
        try:
            return fn()
        except Exception as error:
            elapsed_s = clock.monotonic_s() - started_s
            if not classify(error) or elapsed_s + delay_s > policy.total_limit_s:
                raise
            _log.warning(
                "storage: attempt %d of %d failed after %.1f s, next in %.1f s: %s",
                attempt,
                policy.max_attempts,
                elapsed_s,
                delay_s,
                error,
            )
        clock.sleep(delay_s)
    return fn()
