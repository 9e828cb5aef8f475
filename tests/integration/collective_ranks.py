"""Check collectives in real ranks, whole or broken in one way, and report what each rank saw.

torchrun --nproc-per-node N collective_ranks.py SCENARIO OUT
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from raydist.train.environment import quiet_libraries

quiet_libraries()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from raydist.clock import SystemClock  # noqa: E402
from raydist.testing.fake_clock import FakeClock  # noqa: E402
from raydist.train.collectives import (  # noqa: E402
    check_collectives,
    measure_all_reduce,
    measure_pair,
)


class Whole:
    """torch.distributed itself; the others break one thing of it."""

    def __getattr__(self, name):
        return getattr(dist, name)


class OneElementFlipped(Whole):
    """A rank that receives one wrong number of many."""

    def all_reduce(self, tensor, **options):
        dist.all_reduce(tensor, **options)
        if dist.get_rank() == 1 and tensor.numel() > 17:
            tensor[17] += 1


class MaximumForSum(Whole):
    """A reduction that is another one."""

    def all_reduce(self, tensor, op):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX if op == dist.ReduceOp.SUM else op)


class LostRank(Whole):
    """The last rank's part never arrives."""

    def reduce_scatter_tensor(self, output, tensor):
        if dist.get_rank() == dist.get_world_size() - 1:
            tensor = torch.zeros_like(tensor)
        dist.reduce_scatter_tensor(output, tensor)


class SwappedParts(Whole):
    """Parts arrive in another order."""

    def all_gather_into_tensor(self, output, tensor):
        dist.all_gather_into_tensor(output, tensor)
        output.copy_(output.roll(tensor.numel()))


class SilentBroadcast(Whole):
    """Nothing is received, and nobody says so."""

    def broadcast(self, tensor, src):
        if src == 0:
            dist.broadcast(tensor, src=src)


class NotANumber(Whole):
    """What damaged memory may hold."""

    def broadcast(self, tensor, src):
        dist.broadcast(tensor, src=src)
        if tensor.numel() > 1000:
            tensor[-1] = float("nan")


class FailingGather(Whole):
    """A collective that raises, on every rank."""

    def all_gather_into_tensor(self, output, tensor):
        raise RuntimeError("Connection closed by peer")


class TickingClock(FakeClock):
    """A second passes at every look."""

    def monotonic_s(self):
        self.sleep(1.0)
        return super().monotonic_s()


def broken(library):
    facts, skipped = check_collectives(
        device=torch.device("cpu"), clock=SystemClock(), library=library, large_bytes=1 << 16
    )
    return {"checks": [asdict(fact) for fact in facts], "skipped": skipped}


def whole():
    device = torch.device("cpu")
    found = broken(Whole())
    rate = measure_all_reduce(device=device, clock=SystemClock(), num_bytes=1 << 20)
    found["all_reduce"] = asdict(rate)
    ranks = dist.get_world_size()
    if dist.get_rank() < ranks // 2 * 2:
        found["pair"] = measure_pair(
            dist.get_rank() ^ 1, device=device, clock=SystemClock(), num_bytes=1 << 20
        )
    return found


def cut_short():
    # Rank 1's clock says that there is time: only rank 0's counts.
    clock = TickingClock() if dist.get_rank() == 0 else FakeClock()
    facts, skipped = check_collectives(
        device=torch.device("cpu"), clock=clock, limit_s=10.0, large_bytes=1 << 16
    )
    return {"checks": [asdict(fact) for fact in facts], "skipped": skipped}


def silent_peer():
    if dist.get_rank() == 1:
        return {"pair": "not asked"}
    return {
        "pair": measure_pair(
            1, device=torch.device("cpu"), clock=SystemClock(), num_bytes=4096, limit_s=1.0
        )
    }


SCENARIOS = {
    "whole": whole,
    "cut_short": cut_short,
    "silent_peer": silent_peer,
} | {
    kind.__name__: lambda kind=kind: broken(kind())
    for kind in (
        OneElementFlipped, MaximumForSum, LostRank, SwappedParts, SilentBroadcast, NotANumber,
        FailingGather,
    )
}  # fmt: skip


def main():
    dist.init_process_group("gloo")
    for scenario in sys.argv[1].split(","):
        found = SCENARIOS[scenario]()
        Path(sys.argv[2], f"{scenario}-{dist.get_rank()}.json").write_text(json.dumps(found))
        if scenario != "silent_peer":
            dist.barrier()
    if sys.argv[1] != "silent_peer":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
