# SPDX-License-Identifier: Apache-2.0
"""Ranks agreeing through the rendezvous store, from a thread beside the training.

A process group would do, but for two things: its collectives must not meet the training's, and
one rank that is late breaks it for good. Here a late rank is left behind for once: it finds the
verdict when it comes, and the next agreement has all ranks again.
"""

from __future__ import annotations

import pickle
import time
import zlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from raydist.errors import RankUnreachableError

_PIECE_BYTES = 4 << 20  # torch's store takes values of 8 MiB at most
_PATIENCE = 3  # of time limits: rank 0 may have come late itself, and then waits one


class StoreGroup:
    """The Group contract over keys of the store that the process group was built with.

    Uses a connection of its own: waiting on it does not hold up the training's. Values cross
    pickled, between processes of one run.

    Args:
        name: Prefix of the keys; never used twice in the life of the store.
        timeout_s: How long rank 0 waits for the others' values, and a third of how long they
            wait for rank 0's.
        store: The rendezvous store; None takes the default process group's.
    """

    def __init__(
        self,
        name: str,
        *,
        timeout_s: float,
        rank: int,
        world_size: int,
        store: Store | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._timeout_s = timeout_s
        shared: Any = store or distributed_c10d._get_default_store()
        self._store = PrefixStore(name, shared.clone())
        self._number = 0
        self._broadcasts: list[str] = []

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's value in rank order on rank 0, None elsewhere.

        None stands for a rank that has not come ``timeout_s`` after rank 0.

        Raises:
            RankUnreachableError: The store is gone.
        """
        self._number += 1
        if self.rank != 0:
            self._put(f"{self._number}/{self.rank}", value)
            return None
        deadline = time.monotonic() + self._timeout_s
        values = [value]
        for rank in range(1, self.world_size):
            values.append(self._take(f"{self._number}/{rank}", deadline))
        if None not in values:
            # Every rank is past what was broadcast before.
            for key in self._broadcasts:
                self._delete(key)
            self._broadcasts = []
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank.

        Raises:
            RankUnreachableError: Rank 0 or the store is gone.
        """
        self._number += 1
        key = f"{self._number}/0"
        if self.rank == 0:
            self._put(key, value)
            self._broadcasts.append(key)
            return value
        limit_s = _PATIENCE * self._timeout_s
        if not self._has_come(key, time.monotonic() + limit_s):
            raise RankUnreachableError(
                problem=f"Rank 0 has not said within {limit_s:g} s what became of a save.",
                way_out="Raise checkpoint.agree_timeout_s if the storage is that slow.",
            )
        return self._get(key)

    def _put(self, key: str, value: Any) -> None:
        raw = zlib.compress(pickle.dumps(value), 1)
        pieces = [raw[at : at + _PIECE_BYTES] for at in range(0, len(raw), _PIECE_BYTES)]
        for number, piece in enumerate(pieces[1:], start=1):
            self._ask("set", f"{key}/{number}", piece)
        # The one that is waited for comes last.
        self._ask("set", key, len(pieces).to_bytes(4, "little") + pieces[0])

    def _take(self, key: str, deadline: float) -> Any:
        if not self._has_come(key, deadline):
            return None
        value = self._get(key)
        self._delete(key)
        return value

    def _get(self, key: str) -> Any:
        head = self._ask("get", key)
        rest = [self._ask("get", f"{key}/{number}") for number in range(1, _num_pieces(head))]
        return pickle.loads(zlib.decompress(b"".join([head[4:], *rest])))

    def _delete(self, key: str) -> None:
        for number in range(1, _num_pieces(self._ask("get", key))):
            self._ask("delete_key", f"{key}/{number}")
        self._ask("delete_key", key)

    def _ask(self, operation: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, operation)(*arguments)
        except dist.DistError as error:
            raise _gone(error) from error

    def _has_come(self, key: str, deadline: float) -> bool:
        if self._ask("check", [key]):
            return True
        limit_s = max(0.001, deadline - time.monotonic())
        try:
            self._store.wait([key], timedelta(seconds=limit_s))
        except dist.DistNetworkError as error:
            raise _gone(error) from error
        except dist.DistStoreError:
            return False
        return True


def _num_pieces(head: bytes) -> int:
    return int.from_bytes(head[:4], "little")


def _gone(error: Exception) -> RankUnreachableError:
    return RankUnreachableError(
        problem=f"The ranks' rendezvous store is gone: {str(error).splitlines()[0]}",
        way_out="It ends with rank 0 or its launcher; the run resumes from its last commit.",
    )
