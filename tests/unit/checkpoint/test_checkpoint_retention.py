# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints stay and which objects are garbage. Pure: nothing is faked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.checkpoint.journal import Entry
from raydist.checkpoint.layout import Folder, manifest_key, parse_folder, part_key
from raydist.checkpoint.retention import (
    STALE_UPLOAD_S,
    Frontier,
    RetentionPolicy,
    plan_garbage,
    plan_retention,
    plan_stale_uploads,
)
from raydist.errors import ConfigError
from raydist.storage.stale_uploads import StaleUpload


def commit(number: int, step: int, *, loss: float | None = None) -> Entry:
    facts = {"step": step, "manifest": manifest_key(step, 1)}
    if loss is not None:
        facts["loss"] = loss
    return Entry(
        number=number,
        kind="committed",
        attempt=1,
        driver="d",
        holder="h:1:2",
        unix_s=0.0,
        last_commit=number,
        facts=facts,
    )


def commits(*steps: int) -> list[Entry]:
    """Newest first, as the journal yields them; entry numbers are 2, 3, ..."""
    return [commit(n, step) for n, step in enumerate(steps, start=2)][::-1]


def kept(
    found: Sequence[Entry], policy: RetentionPolicy, *, newest_valid: int | None = -1
) -> list[int]:
    """Steps that stay, newest first; the newest is valid unless said otherwise."""
    if newest_valid == -1:
        newest_valid = found[0].number
    plan = plan_retention(found, (), policy, newest_valid=newest_valid)
    assert [decision.commit for decision in plan] == list(found)
    assert all(decision.reason for decision in plan)
    return [decision.commit.facts["step"] for decision in plan if decision.keep]


TEN = commits(*range(10, 110, 10))


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        (RetentionPolicy(), [100, 90, 80, 70, 60, 50, 40, 30, 20, 10]),
        (RetentionPolicy(keep_last=1), [100]),
        (RetentionPolicy(keep_last=3), [100, 90, 80]),
        (RetentionPolicy(keep_last=30), [100, 90, 80, 70, 60, 50, 40, 30, 20, 10]),
        (RetentionPolicy(keep_last=1, keep_every_steps=40), [100, 80, 40]),
        (RetentionPolicy(keep_last=2, keep_every_steps=45), [100, 90]),
        (RetentionPolicy(keep_every_steps=40), [100, 90, 80, 70, 60, 50, 40, 30, 20, 10]),
    ],
    ids=str,
)
def test_policy_keeps(policy: RetentionPolicy, steps: list[int]) -> None:
    assert kept(TEN, policy) == steps


def test_reasons_name_the_rule() -> None:
    policy = RetentionPolicy(keep_last=2, keep_every_steps=20)
    plan = plan_retention(commits(10, 20, 30, 40), (), policy, newest_valid=5)
    assert [decision.reason for decision in plan] == [
        "it is the newest readable one",
        "it is one of the last 2",
        "its step is a multiple of 20",
        "no rule keeps it",
    ]


def test_best_by_loss_stay_beside_the_last() -> None:
    losses = {2: 3.0, 3: 1.0, 4: None, 5: 2.0, 6: 4.0}
    found = [commit(n, 10 * n, loss=loss) for n, loss in losses.items()][::-1]
    assert kept(found, RetentionPolicy(keep_last=1, keep_best=2)) == [60, 50, 30]


def test_newest_valid_and_all_newer_stay_and_the_rules_count_from_it() -> None:
    assert kept(TEN, RetentionPolicy(keep_last=2), newest_valid=8) == [100, 90, 80, 70, 60][:5]


def test_nothing_is_pruned_while_none_is_known_to_be_readable() -> None:
    assert len(kept(TEN, RetentionPolicy(keep_last=1), newest_valid=None)) == 10


def test_pruned_ones_take_no_place() -> None:
    plan = plan_retention(TEN, {11, 10}, RetentionPolicy(keep_last=2), newest_valid=9)
    assert [d.commit.facts["step"] for d in plan if d.keep] == [80, 70]
    assert len(plan) == 8


def test_step_committed_again_is_kept_for_ever_once() -> None:
    found = commits(10, 20, 20, 30, 40)
    plan = plan_retention(
        found, (), RetentionPolicy(keep_last=1, keep_every_steps=20), newest_valid=6
    )
    assert [d.commit.number for d in plan if d.keep] == [6, 4]


@given(
    steps=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    keep_last=st.integers(1, 5),
    every=st.none() | st.integers(1, 10),
    data=st.data(),
)
def test_newest_valid_and_everything_newer_always_stay(
    steps: list[int], keep_last: int, every: int | None, data: st.DataObject
) -> None:
    found = commits(*steps)
    valid = data.draw(st.sampled_from([c.number for c in found]))
    policy = RetentionPolicy(keep_last=keep_last, keep_every_steps=every)
    plan = plan_retention(found, (), policy, newest_valid=valid)
    stays = {d.commit.number for d in plan if d.keep}
    assert stays >= {c.number for c in found if c.number >= valid}
    assert len(stays) >= min(keep_last, len(found))


@pytest.mark.parametrize("field", ["keep_last", "keep_every_steps", "keep_best"])
def test_policy_that_keeps_nothing_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}=0"):
        RetentionPolicy(**{field: 0})


@pytest.mark.parametrize(
    "folder",
    [
        Folder(attempt=1, step=0),
        Folder(attempt=12345, step=10**13, save=12),
        Folder(attempt=3, step=1200, save=2),
    ],
    ids=str,
)
def test_folder_is_read_back_from_its_keys(folder: Folder) -> None:
    assert parse_folder(folder.prefix + "manifest.json") == folder
    assert parse_folder(part_key(folder.step, folder.attempt, 7, 9, folder.save)) == folder


@pytest.mark.parametrize("key", ["", "journal/hint", "checkpoints/", "checkpoints/step-1/x"])
def test_other_keys_have_no_folder(key: str) -> None:
    assert parse_folder(key) is None


def keys_of(step: int, attempt: int, save: int = 1) -> list[str]:
    return [part_key(step, attempt, 0, 1, save), manifest_key(step, attempt, save)]


def test_garbage_is_what_nobody_committed_or_will() -> None:
    """Attempt 4 holds the run and has committed step 30; the journal begins with attempt 2."""
    groups = {
        "of a lost journal": keys_of(10, 1),
        "committed": keys_of(10, 2),
        "pruned": keys_of(20, 2),
        "of a dead attempt, later than anything": keys_of(90, 3),
        "abandoned by the holder": keys_of(20, 4),
        "abandoned, then saved again": keys_of(30, 4),
        "the holder's newest": keys_of(30, 4, 2),
        "being written by the holder": keys_of(40, 4),
        "being saved again": keys_of(30, 4, 3),
        "of a successor": keys_of(30, 5),
        "of somebody else": ["checkpoints/notes.txt", "checkpoints/step-1/attempt-1/x"],
    }
    live = [manifest_key(10, 2), manifest_key(30, 4, 2)]
    frontier = Frontier(first_attempt=2, before=Folder(attempt=4, step=30, save=2))
    every = [key for keys in groups.values() for key in keys]
    found = plan_garbage(every, live=live, frontier=frontier)
    garbage = {name for name, keys in groups.items() if set(keys) <= set(found)}
    assert garbage == {
        "pruned",
        "of a dead attempt, later than anything",
        "abandoned by the holder",
        "abandoned, then saved again",
    }
    assert len(found) == 8
    assert [key.endswith("manifest.json") for key in found] == [True] * 4 + [False] * 4


def test_stale_uploads_go_by_folder_or_by_age() -> None:
    frontier = Frontier(first_attempt=1, before=Folder(attempt=2, step=30))

    def upload(key: str, age_s: float) -> StaleUpload:
        return StaleUpload(key=key, upload_id="u", age_s=age_s)

    dead = [
        upload(part_key(90, 1, 0, 1), 0.0),
        upload(part_key(20, 2, 0, 1), 0.0),
        upload("checkpoints/step-000000000020/attempt-0001/", 0.0),
        upload("journal/", STALE_UPLOAD_S + 1),
        upload("run.json", STALE_UPLOAD_S + 1),
    ]
    living = [
        upload(part_key(30, 2, 0, 1), 1e5),
        upload(part_key(10, 3, 0, 1), 1e5),
        upload("journal/", STALE_UPLOAD_S - 1),
    ]
    found = plan_stale_uploads([*dead, *living], frontier=frontier)
    assert found == dead
