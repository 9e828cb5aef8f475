# SPDX-License-Identifier: Apache-2.0
"""Collectives checked with known numbers. Real: torchrun ranks over gloo.

Faked: in the broken cases, one function of torch.distributed, so that the check can fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("collective_ranks.py")
pytestmark = pytest.mark.timeout(240)

Found = dict[str, list[dict[str, Any]]]
BROKEN = (
    "OneElementFlipped", "MaximumForSum", "LostRank", "SwappedParts", "SilentBroadcast",
    "NotANumber", "FailingGather",
)  # fmt: skip


def run_ranks(scenarios: tuple[str, ...], folder: Path, world_size: int) -> Found:
    """Return what each rank saw, by scenario, in rank order."""
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={world_size}", str(SCRIPT), ",".join(scenarios), str(folder),
        ],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        name: [json.loads((folder / f"{name}-{r}.json").read_text()) for r in range(world_size)]
        for name in scenarios
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(("whole", "cut_short", *BROKEN), tmp_path_factory.mktemp("ranks"), 2)


def wrong(rank: dict[str, Any]) -> list[dict[str, Any]]:
    return [check for check in rank["checks"] if check["is_right"] is False]


def check_whole(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["skipped"] == 0
        assert wrong(rank) == []
        seen = {(c["name"], c["dtype"]) for c in rank["checks"] if c["is_right"]}
        names = ("all-reduce SUM", "reduce-scatter", "all-gather", "broadcast")
        assert {(n, d) for n in names for d in ("float32", "bfloat16")} < seen
        assert ("barrier", "float32") in seen
        sizes = sorted(c["num_elements"] for c in rank["checks"] if c["name"] == "broadcast")
        assert sizes == [1, 1, 1000, 1000, 1 << 14, 1 << 15]


def test_collectives_of_two_ranks_give_the_known_numbers_and_rates(found: Found) -> None:
    check_whole(found["whole"])
    for rank in found["whole"]:
        assert rank["all_reduce"]["bus_bytes_per_s"] > 0
        assert rank["all_reduce"]["latency_s"] > 0
        assert rank["pair"] > 0


def test_collectives_of_three_ranks_give_the_known_numbers(tmp_path: Path) -> None:
    check_whole(run_ranks(("whole",), tmp_path, 3)["whole"])


@pytest.mark.parametrize(
    ("scenario", "name", "ranks"),
    [
        ("OneElementFlipped", "all-reduce SUM", [1]),
        ("MaximumForSum", "all-reduce SUM", [0, 1]),
        ("LostRank", "reduce-scatter", [0, 1]),
        ("SwappedParts", "all-gather", [0, 1]),
        ("SilentBroadcast", "broadcast", [0]),
        ("NotANumber", "broadcast", [0, 1]),
    ],
)
def test_collective_that_is_broken_is_wrong_on_the_ranks_that_see_it(
    found: Found, scenario: str, name: str, ranks: list[int]
) -> None:
    for rank, seen in enumerate(found[scenario]):
        names = {check["name"] for check in wrong(seen)} - {"all-reduce AVG"}
        assert names == ({name} if rank in ranks else set())
        dtypes = {check["dtype"] for check in wrong(seen) if check["name"] == name}
        assert dtypes == ({"float32", "bfloat16"} if rank in ranks else set())


def test_collective_that_is_wrong_names_element_and_both_numbers(found: Found) -> None:
    flipped = [c for c in wrong(found["OneElementFlipped"][1]) if c["name"] == "all-reduce SUM"]
    assert [check["num_elements"] for check in flipped] == [1000, 1000, 1 << 14, 1 << 15]
    for check in flipped:
        assert check["detail"] == (
            f"1 of {check['num_elements']} elements are wrong, first element 17: 55 and not 54."
        )
    assert "nan and not" in wrong(found["NotANumber"][0])[0]["detail"]


def test_collective_that_raises_ends_the_checks_with_its_words(found: Found) -> None:
    for rank in found["FailingGather"]:
        assert rank["checks"][-1]["name"] == "all-gather"
        assert rank["checks"][-1]["detail"] == "RuntimeError: Connection closed by peer"
        assert len(wrong(rank)) == 1


def test_checks_past_the_time_limit_of_rank_0_are_left_out_on_every_rank(found: Found) -> None:
    first, second = found["cut_short"]
    assert first["skipped"] == second["skipped"] > 0
    assert [c["name"] for c in first["checks"]] == [c["name"] for c in second["checks"]]
    assert first["checks"]
    assert wrong(first) == wrong(second) == []


def test_pair_with_a_peer_that_does_not_answer_has_no_rate(tmp_path: Path) -> None:
    silent = run_ranks(("silent_peer",), tmp_path, 2)["silent_peer"]
    assert silent[0]["pair"] is None
