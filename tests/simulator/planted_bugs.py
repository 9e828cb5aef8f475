# SPDX-License-Identifier: Apache-2.0
"""Ways to get the protocol wrong, each planted into the real code for one test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from simulated_world import SimulatedStore

from raydist.checkpoint import attempt as attempt_module
from raydist.checkpoint import layout, prune, runs
from raydist.checkpoint.attempt import Attempt
from raydist.checkpoint.journal import Entry, Journal
from raydist.checkpoint.prune import Pruner
from raydist.checkpoint.retention import Frontier
from raydist.errors import ObjectExistsError, ObjectMissingError, StorageError

Plant = Callable[[pytest.MonkeyPatch], None]


def append_over_what_is_there(patch: pytest.MonkeyPatch) -> None:
    put = SimulatedStore.put

    def careless(self: Any, key: str, data: Any, *, if_absent: bool = False) -> None:
        put(self, key, data, if_absent=False)

    patch.setattr(SimulatedStore, "put", careless)


def believe_the_hint(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "tail", lambda self: self.read(self._hint()))


def take_a_lost_reply_for_success(patch: pytest.MonkeyPatch) -> None:
    put = SimulatedStore.put

    def optimistic(self: Any, key: str, data: Any, *, if_absent: bool = False) -> None:
        try:
            put(self, key, data, if_absent=if_absent)
        except (ObjectExistsError, ObjectMissingError):
            raise
        except StorageError:
            if not key.startswith("journal/0"):
                raise

    patch.setattr(SimulatedStore, "put", optimistic)


def take_a_lost_reply_for_failure(patch: pytest.MonkeyPatch) -> None:
    commit = Attempt.commit

    def pessimistic(self: Any, **facts: Any) -> Entry:
        try:
            return commit(self, **facts)
        except StorageError as error:
            raise StorageError(problem="it failed") from error

    patch.setattr(Attempt, "commit", pessimistic)


def commit_before_all_parts_are_confirmed(patch: pytest.MonkeyPatch) -> None:
    put = SimulatedStore.put

    def hasty(self: Any, key: str, data: Any, *, if_absent: bool = False) -> None:
        try:
            put(self, key, data, if_absent=if_absent)
        except StorageError:
            if not key.endswith(".safetensors"):
                raise

    patch.setattr(SimulatedStore, "put", hasty)


def write_again_where_an_earlier_save_wrote(patch: pytest.MonkeyPatch) -> None:
    first = layout.Folder.prefix.fget

    def same(self: layout.Folder) -> str:
        return first(layout.Folder(attempt=self.attempt, step=self.step))  # type: ignore[misc]

    patch.setattr(layout.Folder, "prefix", property(same))


def go_on_when_replaced(patch: pytest.MonkeyPatch) -> None:
    read = Journal.read

    def fenceless(self: Any, kind: Any, facts: Any) -> Entry:
        newest = self._journal.tail()
        entry = original(self, kind, facts, newest)
        return entry

    def original(self: Any, kind: Any, facts: Any, tail: Entry) -> Entry:
        number = tail.number + 1
        entry = Entry(
            number=number,
            kind=kind,
            attempt=self.number,
            driver=self.opened.driver,
            holder=self.opened.holder,
            unix_s=0.0,
            last_commit=number if kind == "committed" else tail.last_commit,
            last_pruned=number if kind == "pruned" else tail.last_pruned,
            facts=facts,
        )
        try:
            self._journal.append(entry)
        except ObjectExistsError:
            return original(self, kind, facts, read(self._journal, number) or tail)
        self._go_on_from(entry)
        return entry

    patch.setattr(Attempt, "_append", fenceless)


def start_beside_a_living_writer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attempt_module, "refuse_if_alive", lambda **_: None)
    patch.setattr(runs, "refuse_if_alive", lambda **_: None)


def prune_before_the_newer_is_readable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prune, "is_readable", lambda *_: True)


def delete_before_the_entry(patch: pytest.MonkeyPatch) -> None:
    end = Pruner._end

    def eager(self: Any, ended: list[Entry]) -> None:
        for commit in ended:
            folder = commit.facts["manifest"].rpartition("/")[0] + "/"
            for key, _ in self._store.list(folder):
                self._store.delete(key)
        end(self, ended)

    patch.setattr(Pruner, "_end", eager)


def forget_the_garbage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pruner, "_sweep", lambda *_: None)


def collect_what_is_being_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Frontier, "is_settled", lambda *_: True)


def read_what_was_pruned(patch: pytest.MonkeyPatch) -> None:
    def all_commits(self: Journal, tail: Entry | None) -> Iterator[Entry]:
        commit = self.newest_commit(tail)
        while commit is not None:
            yield commit
            before = self.read(commit.number - 1) if commit.number > 1 else None
            commit = self.newest_commit(before)

    patch.setattr(Journal, "commits", all_commits)
