# SPDX-License-Identifier: Apache-2.0
"""The collectives that training relies on, with known numbers, and how fast they are.

Runs in every rank of an initialised process group, on the backend that trains. Every rank must
call the same functions with the same arguments, as with any collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from raydist.clock import Clock
from raydist.doctor.facts import AllReduceRate, CollectiveFacts

MIB = 1 << 20
SMALL_ELEMENTS = (1, 1000)
"""One element, and a number that is no multiple of a vector, a warp or the ranks of a node."""
DTYPES = (torch.float32, torch.bfloat16)

_MAX_REPEATS = 50
_LEVELS = 32
"""Three times this is exact in bf16, which has 8 bits of significand: so is every partial sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """One collective to check: where, over what, and with how many numbers."""

    library: Any
    device: torch.device
    dtype: torch.dtype
    num_elements: int
    rank: int
    world_size: int

    def values(self, start: int, count: int) -> torch.Tensor:
        """Return [count] numbers for elements from ``start``: 1 to 32, over and over."""
        index = torch.arange(start, start + count, device=self.device)
        return (index % _LEVELS + 1).to(self.dtype)

    def share(self) -> torch.Tensor:
        """Return [num_elements] numbers whose sum over the ranks is three times ``values``.

        Of each element one rank holds the value and the next twice the value, the others zero: the
        sum is exact in whatever order it is made, and a maximum or a lost rank shows.
        """
        index = torch.arange(self.num_elements, device=self.device)
        factor = (index % self.world_size == self.rank).to(self.dtype)
        factor += 2 * ((index + 1) % self.world_size == self.rank).to(self.dtype)
        return factor * self.values(0, self.num_elements)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """A result and what it should be; a tolerance only where division rounds."""

    result: torch.Tensor
    expected: torch.Tensor
    tolerance: float = 0.0


def _all_reduce_sum(case: _Case) -> _Outcome:
    result = case.share()
    case.library.all_reduce(result, op=dist.ReduceOp.SUM)
    return _Outcome(result=result, expected=3 * case.values(0, case.num_elements))


def _all_reduce_avg(case: _Case) -> _Outcome:
    result = case.share()
    case.library.all_reduce(result, op=dist.ReduceOp.AVG)
    expected = 3 * case.values(0, case.num_elements) / case.world_size
    is_exact = case.world_size & (case.world_size - 1) == 0
    tolerance = 0.0 if is_exact else 4 * torch.finfo(case.dtype).eps
    return _Outcome(result=result, expected=expected, tolerance=tolerance)


def _reduce_scatter(case: _Case) -> _Outcome:
    count = case.num_elements // case.world_size
    result = torch.zeros(count, dtype=case.dtype, device=case.device)
    case.library.reduce_scatter_tensor(result, case.share())
    return _Outcome(result=result, expected=3 * case.values(case.rank * count, count))


def _all_gather(case: _Case) -> _Outcome:
    count = case.num_elements // case.world_size
    result = torch.zeros(case.num_elements, dtype=case.dtype, device=case.device)
    case.library.all_gather_into_tensor(result, case.values(case.rank * count, count))
    return _Outcome(result=result, expected=case.values(0, case.num_elements))


def _broadcast(case: _Case) -> _Outcome:
    source = case.world_size - 1
    expected = case.values(7, case.num_elements)
    result = expected.clone() if case.rank == source else torch.zeros_like(expected)
    case.library.broadcast(result, src=source)
    return _Outcome(result=result, expected=expected)


def _barrier(case: _Case) -> _Outcome:
    case.library.barrier()
    nothing = torch.zeros(0, device=case.device)
    return _Outcome(result=nothing, expected=nothing)


_SIZED: dict[str, Callable[[_Case], _Outcome]] = {
    "all-reduce SUM": _all_reduce_sum,
    "all-reduce AVG": _all_reduce_avg,
    "reduce-scatter": _reduce_scatter,
    "all-gather": _all_gather,
    "broadcast": _broadcast,
}
_DIVIDED = ("reduce-scatter", "all-gather")
"""Every rank has an equal part of these: the number of elements is rounded up."""


def check_collectives(
    *,
    device: torch.device,
    clock: Clock,
    limit_s: float = 20.0,
    large_bytes: int = 4 * MIB,
    library: Any = dist,
) -> tuple[tuple[CollectiveFacts, ...], int]:
    """Run every collective, small and large, in fp32 and bf16, and compare with known numbers.

    Small ones come first. A collective that raises ends the checks on this rank: its group may
    be broken.

    Args:
        device: Where the tensors are.
        clock: Time.
        limit_s: Rank 0 starts no check after this many seconds; one that hangs ends with the
            group's own time limit.
        large_bytes: Of the large ones.
        library: What offers the collectives, as torch.distributed does.

    Returns:
        What this rank saw, and the number of checks that the time limit left out.
    """
    started_s = clock.monotonic_s()
    facts: list[CollectiveFacts] = []
    planned = list(_plan(dist.get_world_size(), large_bytes))
    for index, (name, act, dtype, num_elements) in enumerate(planned):
        case = _Case(
            library=library,
            device=device,
            dtype=dtype,
            num_elements=num_elements,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
        )
        try:
            if not _all_go_on(clock.monotonic_s() - started_s < limit_s, device):
                return tuple(facts), len(planned) - index
            fact = _check(name, act, case, clock)
        except Exception as error:
            facts.append(_raised(name, case, error))
            return tuple(facts), 0
        facts.append(fact)
    return tuple(facts), 0


def _plan(
    world_size: int, large_bytes: int
) -> Iterator[tuple[str, Callable[[_Case], _Outcome], torch.dtype, int]]:
    yield "barrier", _barrier, torch.float32, 0
    sizes = {d: [*SMALL_ELEMENTS, large_bytes // d.itemsize] for d in DTYPES}
    for size in range(len(SMALL_ELEMENTS) + 1):
        for dtype in DTYPES:
            for name, act in _SIZED.items():
                count = sizes[dtype][size]
                if name in _DIVIDED:
                    count = -(-count // world_size) * world_size
                yield name, act, dtype, count


def _all_go_on(is_in_time: bool, device: torch.device) -> bool:
    """Return what rank 0 decides: ranks that stopped at different checks would hang."""
    flag = torch.tensor([1.0 if is_in_time else 0.0], device=device)
    dist.broadcast(flag, src=0)
    return bool(flag.item())


def _check(
    name: str, act: Callable[[_Case], _Outcome], case: _Case, clock: Clock
) -> CollectiveFacts:
    fact = CollectiveFacts(
        name=name,
        dtype=str(case.dtype).removeprefix("torch."),
        num_elements=case.num_elements,
        is_right=True,
    )
    started_s = clock.monotonic_s()
    try:
        outcome = act(case)
    except RuntimeError as error:
        if "AVG" in name and "ReduceOp.AVG" in str(error):  # an older gloo
            return replace(fact, is_right=None, detail="the backend offers no AVG")
        raise
    _wait_for(case.device)
    detail = _difference(outcome)
    seconds = clock.monotonic_s() - started_s
    return replace(fact, is_right=not detail, seconds=seconds, detail=detail)


def _difference(outcome: _Outcome) -> str:
    """Return where the result is not what it should be, empty where it is."""
    result, expected = outcome.result, outcome.expected
    close = (result - expected).abs() <= outcome.tolerance * expected.abs()  # NaN is not close
    wrong = (~close).nonzero().flatten()
    if wrong.numel() == 0:
        return ""
    first = int(wrong[0])
    return (
        f"{wrong.numel()} of {result.numel()} elements are wrong, first element {first}: "
        f"{float(result[first]):g} and not {float(expected[first]):g}."
    )


def _raised(name: str, case: _Case, error: Exception) -> CollectiveFacts:
    return CollectiveFacts(
        name=name,
        dtype=str(case.dtype).removeprefix("torch."),
        num_elements=case.num_elements,
        is_right=False,
        detail=f"{type(error).__name__}: {str(error).strip()[:500]}",
    )


def measure_all_reduce(
    *,
    device: torch.device,
    clock: Clock,
    num_bytes: int = 16 * MIB,
    repeats: int = 5,
    latency_repeats: int = 20,
) -> AllReduceRate:
    """Measure all-reduce over all ranks: the middle of several, after one that opens connections.

    Bus bandwidth is bytes / seconds x 2 (n - 1) / n: what each link must carry, whatever the
    number of ranks n.

    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth".

    Args:
        device: Where the tensors are.
        clock: Time.
        num_bytes: Of the tensor whose bandwidth is measured.
        repeats: Of the large ones.
        latency_repeats: Of those of one element.
    """
    large = torch.zeros(num_bytes // 4, device=device)
    small = torch.zeros(1, device=device)
    size = dist.get_world_size()
    dist.all_reduce(large)
    seconds = median(_timed(lambda: dist.all_reduce(large), device, clock, repeats))
    latency_s = median(_timed(lambda: dist.all_reduce(small), device, clock, latency_repeats))
    algorithm_rate = large.numel() * 4 / max(seconds, 1e-9)
    return AllReduceRate(
        num_bytes=large.numel() * 4,
        bus_bytes_per_s=algorithm_rate * 2 * (size - 1) / size,
        latency_s=latency_s,
    )


def measure_pair(
    peer: int,
    *,
    device: torch.device,
    clock: Clock,
    num_bytes: int = 8 * MIB,
    about_s: float = 0.3,
    limit_s: float = 10.0,
    group: Any = None,
) -> float | None:
    """Measure one pair of ranks, called by both at the same time: bytes per second one way.

    The pair sends a tensor there and back, a fast one many times: the best counts, as others use
    the machines too. Ranks in no pair do nothing. Pairs that share no rank may be measured at once.

    Args:
        peer: The other rank.
        device: Where the tensors are.
        clock: Time.
        num_bytes: Of the tensor.
        about_s: How long to go on.
        limit_s: Of one transfer.
        group: The process group, None for the default one.

    Returns:
        None when the peer was not reached or did not answer in time. The group is then not fit
        for more.
    """
    tensor = torch.zeros(num_bytes // 4, device=device)
    is_first = dist.get_rank() < peer

    def there_and_back() -> None:
        _there_and_back(tensor, peer, is_first, limit_s, group)

    try:
        _there_and_back(tensor[:1], peer, is_first, limit_s, group)
        seconds = _timed(there_and_back, device, clock, 1)
        # The first decides for both.
        count = torch.tensor([float(_num_repeats(seconds[0], about_s))], device=device)
        _there_and_back(count, peer, is_first, limit_s, group)
        seconds += _timed(there_and_back, device, clock, int(count.item()))
    except RuntimeError:
        return None
    return 2 * tensor.numel() * 4 / max(min(seconds), 1e-9)


def _num_repeats(seconds: float, about_s: float) -> int:
    return max(0, min(_MAX_REPEATS, round(about_s / max(seconds, 1e-9)) - 1))


def _there_and_back(
    tensor: torch.Tensor, peer: int, is_first: bool, limit_s: float, group: Any
) -> None:
    steps: Sequence[Callable[..., Any]] = (dist.isend, dist.irecv)
    for step in steps if is_first else reversed(steps):
        work = step(tensor, peer, group=group)
        if work is not None:
            work.wait(timedelta(seconds=limit_s))


def _timed(act: Callable[[], Any], device: torch.device, clock: Clock, repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        _wait_for(device)
        started_s = clock.monotonic_s()
        act()
        _wait_for(device)
        seconds.append(clock.monotonic_s() - started_s)
    return seconds


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
