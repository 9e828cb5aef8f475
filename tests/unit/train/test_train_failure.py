# SPDX-License-Identifier: Apache-2.0
"""What a rank says of an exception. Real torch, one process; nothing is faked."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from raydist.train.failure import came_out_of_a_collective, rank_failure


def _raised_by(function, *arguments) -> Exception:
    with pytest.raises(Exception) as caught:
        function(*arguments)
    return caught.value


def test_failure_inside_a_collective_is_collateral() -> None:
    assert came_out_of_a_collective(_raised_by(dist.all_reduce, torch.zeros(1)))


def test_failure_of_a_backward_may_be_a_lost_peer() -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return torch.zeros(99)

    out = Bad.apply(torch.ones(2, requires_grad=True)).sum()
    assert came_out_of_a_collective(_raised_by(out.backward))


@pytest.mark.parametrize("error", [ValueError("x"), torch.OutOfMemoryError("x")])
def test_failure_of_own_code_is_its_own(error: Exception) -> None:
    def fail() -> None:
        raise error

    failure = rank_failure(_raised_by(fail), rank=3, step=7)
    assert not failure.is_collateral
    assert (failure.rank, failure.step, failure.error) == (3, 7, type(error).__name__)
    assert "test_train_failure.py" in failure.text
