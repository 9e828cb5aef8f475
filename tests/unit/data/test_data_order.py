# SPDX-License-Identifier: Apache-2.0
"""Sample order: exact properties, and statistics over fixed seeds. Nothing is faked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from raydist.data.order import sample_indices

_COUNTS = [
    *range(1, 20), 31, 32, 33, 63, 64, 65, 100, 255, 256, 257, 1000, 1023, 1024, 1025,
    4095, 4096, 4097, 65_535, 65_536, 65_537,
]  # fmt: skip


def _epochs(num_samples: int, num_epochs: int, *, seed: int = 0) -> NDArray[np.int64]:
    """Indices, [num_epochs, num_samples]."""
    positions = np.arange(num_samples * num_epochs, dtype=np.int64).reshape(num_epochs, -1)
    epochs = [sample_indices(row, num_samples=num_samples, seed=seed) for row in positions]
    return np.stack(epochs)


@pytest.mark.parametrize("num_samples", _COUNTS)
def test_order_of_each_epoch_is_a_permutation(num_samples: int) -> None:
    for epoch in _epochs(num_samples, 3):
        assert np.array_equal(np.sort(epoch), np.arange(num_samples))


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64), st.integers(0, 10**6))
def test_order_of_any_seed_and_epoch_is_a_permutation(
    num_samples: int, seed: int, epoch: int
) -> None:
    positions = epoch * num_samples + np.arange(num_samples, dtype=np.int64)
    indices = sample_indices(positions, num_samples=num_samples, seed=seed)
    assert indices.dtype == np.int64
    assert np.array_equal(np.sort(indices), np.arange(num_samples))


def test_order_differs_between_epochs_and_seeds() -> None:
    orders = [tuple(epoch) for seed in range(4) for epoch in _epochs(100, 4, seed=seed)]
    assert len(set(orders)) == len(orders)
    assert tuple(range(100)) not in orders


def test_order_of_three_samples_takes_all_six_orders_about_equally() -> None:
    orders, counts = np.unique(_epochs(3, 1200), axis=0, return_counts=True)
    assert len(orders) == 6
    assert ((counts - 200) ** 2 / 200).sum() < 25  # chi-square, 5 degrees: p = 1e-4


def test_order_of_four_samples_takes_all_24_orders_about_equally() -> None:
    orders, counts = np.unique(_epochs(4, 2400), axis=0, return_counts=True)
    assert len(orders) == 24
    assert ((counts - 100) ** 2 / 100).sum() < 57  # chi-square, 23 degrees: p = 1e-4


def test_order_called_in_any_slices_is_the_same() -> None:
    positions = np.arange(2500, dtype=np.int64)
    whole = sample_indices(positions, num_samples=1000, seed=7)
    assert np.array_equal(whole, sample_indices(positions, num_samples=1000, seed=7))
    for size in (1, 7, 999):
        parts = [
            sample_indices(positions[at : at + size], num_samples=1000, seed=7)
            for at in range(0, len(positions), size)
        ]
        assert np.array_equal(np.concatenate(parts), whole)


def test_order_of_a_fixed_seed_is_frozen() -> None:
    """A run that is resumed by a later raydist must go on in the same order."""
    assert _epochs(10, 2, seed=3).tolist() == [
        [3, 5, 8, 0, 7, 6, 2, 4, 1, 9],
        [8, 0, 3, 5, 9, 4, 2, 1, 7, 6],
    ]


def test_order_of_no_positions_is_empty() -> None:
    assert sample_indices(np.empty(0, np.int64), num_samples=5, seed=0).shape == (0,)


def test_order_unshuffled_is_corpus_order_in_every_epoch() -> None:
    indices = sample_indices(np.arange(12), num_samples=5, seed=9, shuffle=False)
    assert indices.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_order_across_an_epochs_end_carries_the_tail_over() -> None:
    first, second = _epochs(101, 2, seed=5)
    batch = sample_indices(np.arange(96, 112), num_samples=101, seed=5)
    assert np.array_equal(batch, np.concatenate([first[96:], second[:11]]))


def test_order_over_ten_epochs_uses_each_sample_ten_times() -> None:
    indices = np.concatenate(
        [
            sample_indices(np.arange(at, at + 48), num_samples=240, seed=1)
            for at in range(0, 2400, 48)
        ]
    )
    assert np.array_equal(np.bincount(indices), np.full(240, 10))


def test_order_of_ten_billion_samples_is_in_range_and_distinct() -> None:
    count = 10**10
    rng = np.random.default_rng(0)
    scattered = np.unique(rng.integers(0, count, 50_000))
    positions = np.concatenate([np.arange(1000), scattered[scattered >= 1000]])
    indices = sample_indices(positions, num_samples=count, seed=11)
    assert indices.min() >= 0
    assert indices.max() < count
    assert len(np.unique(indices)) == len(positions)
    later = sample_indices(positions + 3 * count, num_samples=count, seed=11)
    assert not (later == indices).any()


@pytest.mark.parametrize("num_samples", [16, 100, 1000, 1024, 50_000])
def test_order_position_says_nothing_about_the_samples_bucket(num_samples: int) -> None:
    epochs = _epochs(num_samples, min(1000, 400_000 // num_samples), seed=2)
    buckets = np.arange(num_samples) * 8 // num_samples
    table = np.zeros((8, 8))
    for epoch in epochs:
        np.add.at(table, (buckets, buckets[epoch]), 1)
    sizes = np.bincount(buckets)
    expected = np.outer(sizes, sizes) * len(epochs) / num_samples
    chi_square = ((table - expected) ** 2 / expected).sum()
    assert chi_square < 105  # 49 degrees: p = 1e-5


@pytest.mark.parametrize("num_samples", [10, 64, 1000, 1024, 4096])
def test_order_neighbours_have_no_fixed_small_offset(num_samples: int) -> None:
    epochs = _epochs(num_samples, min(1000, 1_000_000 // num_samples), seed=4)
    steps = np.diff(epochs, axis=1)
    for offset in (-8, -4, -3, -2, -1, 1, 2, 3, 4, 8):
        # Of n (n - 1) ordered pairs of samples, n - |offset| are that far apart.
        share = (num_samples - abs(offset)) / (num_samples * (num_samples - 1))
        expected = steps.size * share
        assert abs((steps == offset).sum() - expected) < 5 * np.sqrt(expected), offset


def test_order_neighbours_have_no_common_bit_pattern() -> None:
    epochs = _epochs(1024, 1000, seed=6)
    patterns = np.bincount((epochs[:, 1:] ^ epochs[:, :-1]).ravel(), minlength=1024)[1:]
    expected = patterns.sum() / 1023
    assert np.abs(patterns - expected).max() < 5.5 * np.sqrt(expected)


def test_order_of_one_epoch_says_nothing_about_the_next() -> None:
    epochs = _epochs(1000, 500, seed=8)
    for distance in (1, 2, 16):
        same = (epochs[distance:] == epochs[:-distance]).sum()
        assert abs(same - (500 - distance)) < 5 * np.sqrt(500)
