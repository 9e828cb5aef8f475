# SPDX-License-Identifier: Apache-2.0
"""The manifest's long columns there and back. Nothing is faked."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.checkpoint.objects import StoredRange
from raydist.checkpoint.packing import pack_blocks, pack_ranges, unpack_blocks, unpack_ranges
from raydist.checkpoint.sealed import seal, unseal


@given(blocks=st.lists(st.integers(0, 2**32 - 1)))
def test_blocks_come_back_as_they_were(blocks: list[int]) -> None:
    assert list(unpack_blocks(pack_blocks(blocks))) == blocks


def test_blocks_are_little_endian_words_in_base64() -> None:
    assert pack_blocks([1, 256]) == "AQAAAAABAAA="


@pytest.mark.parametrize("packed", ["A", "AQAA", "AQAAAA", "AQ AAAA=", "AQAAAAA="])
def test_blocks_that_are_no_words_are_refused(packed: str) -> None:
    with pytest.raises(ValueError):
        unpack_blocks(packed)


@settings(deadline=None)
@given(
    ranges=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.builds(
                StoredRange,
                offset=st.integers(0, 6),
                length=st.integers(0, 2),
                byte_start=st.sampled_from([16, 24]),
            ),
        ),
        max_size=12,
    )
)
def test_any_ranges_come_back_as_they_were(ranges: list[tuple[int, StoredRange]]) -> None:
    runs = pack_ranges(tuple(ranges))
    assert list(unpack_ranges(runs)) == ranges
    assert len(runs) <= len(ranges)


def equal_slices(count: int) -> tuple[tuple[int, StoredRange], ...]:
    return tuple(
        (rank, StoredRange(offset=5 * rank, length=5, byte_start=64)) for rank in range(count)
    )


def test_equal_slices_over_ranks_are_one_run() -> None:
    assert pack_ranges(equal_slices(1000)) == [[0, 0, 5, 64, 1000]]


# Sealed records


@pytest.mark.parametrize(
    "record", [{}, {"a": 1}, {"a": {"crc32c": 7}}, {"crc32c_": [1]}, {"text": ',"crc32c":5}'}]
)
def test_sealed_record_is_opened_and_any_other_byte_is_seen(record: dict[str, object]) -> None:
    raw = seal(record)
    assert unseal(raw) == record
    for at in range(len(raw)):
        altered = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        try:
            found = unseal(altered)
        except ValueError:
            continue
        assert found == record  # white space, or a number written otherwise
