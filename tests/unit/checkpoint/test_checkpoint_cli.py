# SPDX-License-Identifier: Apache-2.0
"""`raydist ckpt` on a directory. Real: LocalStore, journal, processes. Faked: ranks are threads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint_scenario import ToyRun, entries, random_state

from raydist.checkpoint import lease
from raydist.checkpoint.attempt import open_attempt
from raydist.checkpoint.layout import journal_key, manifest_key, part_key
from raydist.cli.main import main
from raydist.clock import SystemClock
from raydist.storage.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A closed run of steps 10, 20, 30 by 2 ranks."""
    store = LocalStore(str(tmp_path / "toy"))
    run = ToyRun(store)
    for step in (10, 20, 30):
        run.save(random_state(step), step)
    run.attempt.close("finished")
    return store


def ckpt(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["ckpt", *arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    status, out, err = ckpt(capsys, *arguments, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def test_ls_and_verify_say_the_same_in_both_forms(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = ckpt(capsys, "ls", store.root)
    assert status == 0
    assert [line.split()[1] for line in out.splitlines()] == ["30", "20", "10"]
    listed = as_json(capsys, "ls", store.root)
    assert [(i["step"], i["known_by"], i["problem"]) for i in listed] == [
        (30, "journal", ""),
        (20, "journal", ""),
        (10, "journal", ""),
    ]
    assert [entry["problems"] for entry in as_json(capsys, "verify", store.root)] == [[], [], []]
    status, out, _ = ckpt(capsys, "verify", store.root, "--step", "20")
    assert status == 0
    assert out.startswith("step       20  attempt 1  ok, ")


@pytest.mark.parametrize("number", range(1, 6))
@pytest.mark.parametrize("harm", ["garbage", "gone"])
def test_ls_and_verify_go_on_with_a_damaged_journal_entry(
    store: LocalStore, capsys: pytest.CaptureFixture[str], number: int, harm: str
) -> None:
    store.put("journal/hint", b"5")
    if harm == "gone":
        store.delete(journal_key(number))
    else:
        store.put(journal_key(number), b"garbage")
    status, out, err = ckpt(capsys, "ls", store.root, "--json")
    assert status == 0
    found = json.loads(out)
    assert [(info["step"], info["problem"]) for info in found] == [(30, ""), (20, ""), (10, "")]
    is_noticed = (harm, number) != ("gone", 5)  # without its last entry it is a shorter journal
    assert err.startswith("damaged journal: ") == is_noticed
    assert str(number) in err or not is_noticed
    committed = {2: [10], 3: [20], 4: [30]}.get(number, [])
    assert [i["step"] for i in found if i["known_by"] == "manifest"] == committed
    status, out, _ = ckpt(capsys, "verify", store.root)
    assert out.count(" ok, ") == 3
    assert status == (5 if is_noticed else 0)


def test_damaged_journal_does_not_bring_pruned_checkpoints_back(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ckpt(capsys, "prune", store.root, "--keep-last", "1")[0] == 0
    store.put(manifest_key(20, 1), store.get(manifest_key(30, 1)))  # a delete that did not last
    store.put(journal_key(4), b"garbage")
    status, out, err = ckpt(capsys, "ls", store.root)
    assert status == 0
    assert journal_key(4) in err
    assert [line.split()[1] for line in out.splitlines()] == ["30"]


def test_show_says_what_the_manifest_holds(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    found = as_json(capsys, "show", store.root)
    assert found["progress"]["step"] == 30
    assert found["bytes_by_kind"] == {"master": 144, "exp_avg": 140, "buffer": 17, "rng": 22}
    assert found["total_bytes"] == sum(found["rank_bytes"])
    assert as_json(capsys, "show", store.root, "--step", "10")["progress"]["step"] == 10
    status, out, _ = ckpt(capsys, "show", store.root)
    assert status == 0
    for part in ("run toy, attempt 1", "ddp on 2, fp32", "step 30", "raydist test", "exp_avg"):
        assert part in out


def test_show_of_a_step_that_is_not_there_names_those_that_are(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = ckpt(capsys, "show", store.root, "--step", "11")
    assert status == 2
    assert "step 11" in err
    assert "30, 20, 10" in err


def test_diff_tells_facts_and_with_deep_values(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    found = as_json(capsys, "diff", store.root, "10", "30")
    assert found["differs"]["progress.step"] == [10, 30]
    assert "values" not in found
    deep = as_json(capsys, "diff", store.root, "10", "30", "--deep")["values"]
    by_key = {entry["key"]: entry for entry in deep}
    assert by_key["buffer/mask"]["numel"] == 9
    assert by_key["rng/cpu/rank-00000-of-00002"]["max_abs"] == 0.0
    status, out, _ = ckpt(capsys, "diff", store.root, "10", "10", "--deep")
    assert status == 0
    assert out.splitlines()[0] == "the same but for values"
    assert "master/embed.weight: max |a-b| 0, 0 of 35 elements differ" in out


def test_prune_ends_old_ones_and_leaves_a_run_that_resumes(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(store.list(""))
    planned = as_json(capsys, "prune", store.root, "--keep-last", "1", "--dry-run")
    assert sorted(store.list("")) == before
    assert [(d["step"], d["keep"]) for d in planned["decisions"]] == [
        (30, True),
        (20, False),
        (10, False),
    ]
    done = as_json(capsys, "prune", store.root, "--keep-last", "1")
    assert done["decisions"] == planned["decisions"]
    assert done["outcome"]["steps"] == [20, 10]
    assert done["outcome"]["num_deleted"] == 6
    assert [info["step"] for info in as_json(capsys, "ls", store.root)] == [30]
    assert [e.kind for e in entries(store)][-3:] == ["opened", "pruned", "closed"]
    assert ToyRun(store, driver="driver-b").attempt.number == 3


def test_prune_in_words(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    store.put(part_key(40, 1, 0, 2), bytes(1 << 20))
    status, out, _ = ckpt(capsys, "prune", store.root)
    assert status == 0
    assert out.splitlines() == [
        "keep   step       30  attempt 1  all are kept",
        "keep   step       20  attempt 1  all are kept",
        "keep   step       10  attempt 1  all are kept",
        "1 objects deleted, 1.0 MiB",
    ]


def test_prune_of_a_run_that_is_being_trained_is_refused(
    store: LocalStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_RENEW_S", 0.01)
    alive = open_attempt(run="toy", store=store, driver="d", clock=SystemClock())
    try:
        status, _, err = ckpt(capsys, "prune", store.root, "--keep-last", "1")
    finally:
        alive.release()
    assert status == 2
    assert err.startswith("RunAliveError: ")
    assert entries(store)[-1] == alive.opened
    assert len(as_json(capsys, "ls", store.root)) == 3


def test_prune_where_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = ckpt(capsys, "prune", str(tmp_path / "nothing"), "--keep-last", "1")
    assert status == 2
    assert "no journal" in err
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("command", ["ls", "verify", "show"])
def test_output_that_cannot_be_written_is_no_traceback(store: LocalStore, command: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "raydist.cli.main", "ckpt", command, store.root],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "raydist: the output cannot be written: No space left on device\n"
