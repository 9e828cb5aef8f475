# SPDX-License-Identifier: Apache-2.0
"""The retry schedule, on a clock that moves only when told."""

from __future__ import annotations

import random

import pytest

from raydist.errors import ConfigError
from raydist.storage.retry import (
    Breakage,
    RequestFailure,
    RetryPolicy,
    call_with_retry,
    delays,
    is_retryable,
)


class SteppingClock:
    """Time passes in sleep, and by ``step_s`` with every look at the clock."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.time_s = 100.0
        self.step_s = step_s
        self.sleeps_s: list[float] = []

    def now_unix_s(self) -> float:
        return self.time_s

    def monotonic_s(self) -> float:
        self.time_s += self.step_s
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.sleeps_s.append(seconds)
        self.time_s += seconds


class HighestRandom(random.Random):
    """Always draws the upper end."""

    def uniform(self, a: float, b: float) -> float:
        return b


class Flaky:
    """Fails ``num_failures`` times with ``error``, then returns 42."""

    def __init__(self, num_failures: int, error: Exception) -> None:
        self.num_failures = num_failures
        self.error = error
        self.num_calls = 0

    def __call__(self) -> int:
        self.num_calls += 1
        if self.num_calls <= self.num_failures:
            raise self.error
        return 42


def is_os_error(error: Exception) -> bool:
    return isinstance(error, OSError)


def test_delays_double_up_to_the_cap() -> None:
    policy = RetryPolicy(max_attempts=6, base_delay_s=1.0, max_delay_s=5.0)
    assert list(delays(policy, HighestRandom())) == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_delays_are_jittered_over_the_whole_interval() -> None:
    policy = RetryPolicy(max_attempts=2, base_delay_s=1.0)
    rng = random.Random(3)
    drawn = [next(delays(policy, rng)) for _ in range(200)]
    assert min(drawn) < 0.1
    assert max(drawn) > 0.9
    assert all(0.0 <= delay_s <= 1.0 for delay_s in drawn)


def test_delays_of_one_attempt_are_none() -> None:
    assert list(delays(RetryPolicy(max_attempts=1), random.Random())) == []


def test_delays_of_very_many_attempts_stay_finite() -> None:
    policy = RetryPolicy(max_attempts=5_000, max_delay_s=3.0)
    assert max(delays(policy, random.Random(0))) <= 3.0


@pytest.mark.parametrize("change", [{"max_attempts": 0}, {"base_delay_s": -1.0}])
def test_policy_that_cannot_be_kept_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RetryPolicy(**change)  # pyright: ignore[reportArgumentType] - parametrized names


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (503, "SlowDown"),
        (500, "InternalError"),
        (502, ""),
        (504, ""),
        (429, "TooManyRequests"),
        (400, "RequestTimeout"),
        (408, ""),
        (409, "ConditionalRequestConflict"),
        (200, "InternalError"),
    ],
)
def test_passing_answers_are_retryable(status: int, code: str) -> None:
    failure = RequestFailure(breakage=Breakage.ANSWERED, http_status=status, code=code)
    assert is_retryable(failure)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (403, "AccessDenied"),
        (404, "NoSuchBucket"),
        (404, "NoSuchKey"),
        (412, "PreconditionFailed"),
        (400, "InvalidArgument"),
        (403, "SignatureDoesNotMatch"),
        (501, "NotImplemented"),
        (409, "BucketAlreadyExists"),
    ],
)
def test_answers_that_will_not_change_are_final(status: int, code: str) -> None:
    failure = RequestFailure(breakage=Breakage.ANSWERED, http_status=status, code=code)
    assert not is_retryable(failure)


@pytest.mark.parametrize(
    ("breakage", "retryable", "may_have_happened"),
    [
        (Breakage.UNREACHED, True, False),
        (Breakage.CUT, True, True),
        (Breakage.REFUSED_HERE, False, False),
    ],
)
def test_silence_is_retryable_and_ambiguous_only_after_sending(
    breakage: Breakage, retryable: bool, may_have_happened: bool
) -> None:
    failure = RequestFailure(breakage=breakage)
    assert is_retryable(failure) is retryable
    assert failure.may_have_happened is may_have_happened


def test_server_errors_may_have_happened_and_client_errors_not() -> None:
    answered = [
        RequestFailure(breakage=Breakage.ANSWERED, http_status=status) for status in (500, 503, 409)
    ]
    assert [failure.may_have_happened for failure in answered] == [True, True, False]


def test_call_returns_after_passing_failures() -> None:
    clock = SteppingClock()
    flaky = Flaky(2, OSError("reset"))
    policy = RetryPolicy(max_attempts=5, base_delay_s=1.0)
    result = call_with_retry(
        flaky, policy=policy, clock=clock, rng=HighestRandom(), classify=is_os_error
    )
    assert result == 42
    assert clock.sleeps_s == [1.0, 2.0]


def test_call_final_failure_is_raised_at_once() -> None:
    clock = SteppingClock()
    error = KeyError("final")
    flaky = Flaky(9, error)
    with pytest.raises(KeyError) as caught:
        call_with_retry(
            flaky, policy=RetryPolicy(), clock=clock, rng=random.Random(), classify=is_os_error
        )
    assert caught.value is error
    assert flaky.num_calls == 1
    assert clock.sleeps_s == []


def test_call_stops_after_max_attempts() -> None:
    flaky = Flaky(99, OSError("down"))
    with pytest.raises(OSError, match="down"):
        call_with_retry(
            flaky,
            policy=RetryPolicy(max_attempts=4),
            clock=SteppingClock(),
            rng=random.Random(0),
            classify=is_os_error,
        )
    assert flaky.num_calls == 4


def test_call_starts_no_attempt_past_the_total_limit() -> None:
    clock = SteppingClock(step_s=10.0)  # each attempt takes 10 s
    flaky = Flaky(99, OSError("slow"))
    policy = RetryPolicy(max_attempts=50, base_delay_s=0.0, total_limit_s=35.0)
    with pytest.raises(OSError, match="slow"):
        call_with_retry(
            flaky, policy=policy, clock=clock, rng=random.Random(0), classify=is_os_error
        )
    assert flaky.num_calls == 4
