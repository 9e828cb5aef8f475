# SPDX-License-Identifier: Apache-2.0
"""The offset of a clock from four stamps. Faked: the clocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.doctor.clocks import clock_offset, measure_offset
from raydist.testing.fake_clock import FakeClock

seconds = st.floats(0.0, 5.0)


@pytest.mark.parametrize(
    ("stamps", "offset_s", "round_trip_s"),
    [
        ((100.0, 100.5, 100.6, 101.1), 0.0, 1.0),
        ((100.0, 110.5, 110.6, 101.1), 10.0, 1.0),
        ((100.0, 90.5, 90.6, 101.1), -10.0, 1.0),
        ((100.0, 101.0, 101.0, 101.0), 0.5, 1.0),
    ],
    ids=["none", "ahead", "behind", "one_way_only"],
)
def test_offset_of_four_stamps(
    stamps: tuple[float, float, float, float], offset_s: float, round_trip_s: float
) -> None:
    asked, received, replied, answered = stamps
    found = clock_offset(
        asked_s=asked, received_s=received, replied_s=replied, answered_s=answered
    )  # fmt: skip
    assert found.offset_s == pytest.approx(offset_s)
    assert found.round_trip_s == pytest.approx(round_trip_s)


@given(there_s=seconds, work_s=seconds, back_s=seconds, ahead_s=st.floats(-1000.0, 1000.0))
def test_offset_is_right_within_half_of_the_round_trip(
    there_s: float, work_s: float, back_s: float, ahead_s: float
) -> None:
    found = clock_offset(
        asked_s=50.0,
        received_s=50.0 + there_s + ahead_s,
        replied_s=50.0 + there_s + work_s + ahead_s,
        answered_s=50.0 + there_s + work_s + back_s,
    )
    assert abs(found.offset_s - ahead_s) <= found.round_trip_s / 2 + 1e-9
    assert found.round_trip_s == pytest.approx(there_s + back_s, abs=1e-9)


def test_measured_offset_is_that_of_the_fastest_answer() -> None:
    clock = FakeClock()
    ways = iter([(3.0, 0.0), (0.1, 0.1), (0.0, 2.0)])
    asked = []

    def ask() -> tuple[float, float]:
        there_s, back_s = next(ways)
        clock.sleep(there_s)
        stamp = clock.now_unix_s() + 7.0
        asked.append(stamp)
        clock.sleep(back_s)
        return stamp, stamp

    found = measure_offset(ask, clock=clock)
    assert len(asked) == 3
    assert found.offset_s == pytest.approx(7.0)
    assert found.round_trip_s == pytest.approx(0.2)
