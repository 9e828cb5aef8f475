# SPDX-License-Identifier: Apache-2.0
"""The manifest's long columns there and back. Nothing is faked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.checkpoint.objects import StoredRange
from raydist.checkpoint.packing import Runs, pack_blocks, unpack_blocks
from raydist.checkpoint.ranges import partition
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


RANGES = st.lists(
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


@given(ranges=RANGES)
def test_any_ranges_come_back_as_they_were(ranges: list[tuple[int, StoredRange]]) -> None:
    runs = Runs.of(ranges)
    assert list(runs) == ranges
    assert runs == ranges
    assert len(runs) == len(ranges)
    assert Runs([list(run) for run in runs.runs]) == runs
    if ranges:
        assert runs[-1] == ranges[-1]
        assert runs != ranges[1:]


@given(world_size=st.integers(1, 9), numel=st.integers(0, 40), first=st.integers(0, 40))
def test_overlapping_ranges_are_those_with_wanted_elements(
    world_size: int, numel: int, first: int
) -> None:
    slices = [partition(numel, world_size=world_size, rank=rank) for rank in range(world_size)]
    ranges = [
        (rank, StoredRange(offset=offset, length=length, byte_start=8))
        for rank, (offset, length) in enumerate(slices)
    ]
    for last in range(first, numel + 1):
        due = [
            one
            for one in ranges
            if max(first, one[1].offset) < min(last, one[1].offset + one[1].length)
        ]
        found = list(Runs.of(ranges).overlapping(first, last))
        assert [one for one in found if one in due] == due
        assert first == last or found == due


def test_equal_slices_over_ranks_are_one_run() -> None:
    ranges = [(rank, StoredRange(offset=5 * rank, length=5, byte_start=64)) for rank in range(1000)]
    assert Runs.of(ranges).runs == [(0, 0, 5, 64, 1000)]


@pytest.mark.parametrize("run", [[0, 0, 5, 64], [0, 0, 5, 64, 1, 1], []])
def test_run_that_is_not_five_numbers_is_refused(run: list[int]) -> None:
    with pytest.raises(ValueError):
        Runs([run])


# Sealed records


@pytest.mark.parametrize(
    "record", [{}, {"a": 1}, {"a": {"crc32c": 7}}, {"crc32c_": [1]}, {"text": ',"crc32c":5}'}]
)
def test_sealed_record_is_opened_and_any_other_bit_is_seen(record: dict[str, object]) -> None:
    raw = seal(record)
    assert unseal(raw) == record
    for at in range(len(raw)):
        for bit in range(8):
            altered = raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]
            with pytest.raises(ValueError):
                unseal(altered)


def test_sealed_record_with_a_number_written_otherwise_is_refused() -> None:
    raw = seal({"unix_s": 1.7})
    with pytest.raises(ValueError, match="checksum"):
        unseal(raw.replace(b"1.7", b"1.70"))
