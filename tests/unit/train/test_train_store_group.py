# SPDX-License-Identifier: Apache-2.0
"""Ranks that agree through torch's store. Faked: ranks are threads, the store is in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from raydist.errors import RankUnreachableError
from raydist.train import store_group
from raydist.train.store_group import StoreGroup


def groups(world_size: int, *, timeout_s: float = 20.0, name: str = "a") -> list[StoreGroup]:
    store = HashStore()
    return [
        StoreGroup(name, timeout_s=timeout_s, rank=rank, world_size=world_size, store=store)
        for rank in range(world_size)
    ]


def on_all(members: list[StoreGroup], work: Callable[[StoreGroup], Any]) -> list[Any]:
    results: dict[int, Any] = {}

    def one(member: StoreGroup) -> None:
        try:
            results[member.rank] = work(member)
        except RankUnreachableError as error:
            results[member.rank] = error

    threads = [threading.Thread(target=one, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [results[member.rank] for member in members]


def test_every_value_reaches_rank_0_and_rank_0s_reaches_all() -> None:
    def work(member: StoreGroup) -> Any:
        gathered = member.gather({"rank": member.rank, "raw": bytes([member.rank])})
        return gathered, member.broadcast(f"from {member.rank}")

    found = on_all(groups(3), work)
    everyone = [{"rank": rank, "raw": bytes([rank])} for rank in range(3)]
    assert found == [(everyone, "from 0"), (None, "from 0"), (None, "from 0")]


def test_agreements_follow_each_other_without_leaving_keys() -> None:
    members = groups(2)

    def work(member: StoreGroup) -> list[Any]:
        found = []
        for number in range(20):
            found += [member.gather(number * member.rank), member.broadcast(number)]
        return found

    leading, following = on_all(members, work)
    assert leading == [x for n in range(20) for x in ([0, n], n)]
    assert following == [x for n in range(20) for x in (None, n)]
    store: Any = members[0]._store
    # All but what the last broadcast has to leave, since nobody knows who has read it.
    assert store.num_keys() == 1


def test_value_larger_than_a_key_may_be_crosses_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_group, "_PIECE_BYTES", 1000)
    value = {str(n): [n, n * 7919] for n in range(3000)}
    members = groups(2)

    def work(member: StoreGroup) -> Any:
        return member.gather(value), member.broadcast(value)

    assert on_all(members, work) == [([value, value], value), (None, value)]


def test_late_rank_is_left_behind_once_and_finds_the_verdict() -> None:
    members = groups(3, timeout_s=0.2)
    first, second, late = members

    def save(member: StoreGroup) -> Any:
        return member.gather(member.rank), member.broadcast(("verdict", member.rank))

    assert on_all([first, second], save) == [([0, 1, None], ("verdict", 0)), (None, ("verdict", 0))]
    assert save(late) == (None, ("verdict", 0))
    for member in members:
        member._timeout_s = 20.0
    assert on_all(members, save)[0] == ([0, 1, 2], ("verdict", 0))


def test_rank_0_that_never_comes_is_waited_for_no_longer_than_said() -> None:
    members = groups(2, timeout_s=0.1)
    found = on_all(members[1:], lambda member: member.broadcast(None))
    assert isinstance(found[0], RankUnreachableError)
    assert "within 0.3 s" in str(found[0])
    assert "checkpoint.agree_timeout_s" in str(found[0])


def test_groups_of_two_names_on_one_store_do_not_meet() -> None:
    store = HashStore()
    for name in ("attempt-1", "attempt-2"):
        members = [
            StoreGroup(name, timeout_s=20, rank=rank, world_size=2, store=store)
            for rank in range(2)
        ]
        found = on_all(members, lambda member, name=name: member.gather((name, member.rank)))
        assert found[0] == [(name, 0), (name, 1)]
