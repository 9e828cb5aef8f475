# SPDX-License-Identifier: Apache-2.0
"""A save on demand: someone leaves an object, rank 0 finds it and takes it away."""

from __future__ import annotations

import json
import threading
import uuid

from raydist.checkpoint import layout
from raydist.clock import Clock
from raydist.errors import ObjectMissingError, StorageError
from raydist.storage import ObjectStore

LOOK_EVERY_S = 3.0


def request_save(store: ObjectStore, *, clock: Clock) -> None:
    """Ask the run at ``store`` for a save; several requests before it is made are one.

    Raises:
        StorageError: The request could not be left.
    """
    request = {"id": uuid.uuid4().hex, "unix_s": clock.now_unix_s()}
    store.put(layout.SAVE_REQUEST_KEY, json.dumps(request).encode())


class RequestWatch:
    """Looks for requests from a thread, so that no step waits for the storage. Rank 0."""

    def __init__(self, store: ObjectStore, *, every_s: float = LOOK_EVERY_S) -> None:
        self._store = store
        self._every_s = every_s
        self._seen = b""
        self._is_requested = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="raydist-requests", daemon=True)
        self._thread.start()

    def take(self) -> bool:
        """Whether there was a request since the last call."""
        is_requested = self._is_requested.is_set()
        if is_requested:
            self._is_requested.clear()
        return is_requested

    def close(self) -> None:
        """Look no more."""
        self._stopping.set()

    def _watch(self) -> None:
        while not self._stopping.wait(self._every_s):
            try:
                self.look()
            except StorageError:
                continue  # A save on demand is late then; those by the clock are not.

    def look(self) -> None:
        """Look once.

        Raises:
            StorageError: The storage did not answer.
        """
        try:
            request = self._store.get(layout.SAVE_REQUEST_KEY)
        except ObjectMissingError:
            return
        if request != self._seen:  # where it could not be deleted it still counts once
            self._seen = request
            self._is_requested.set()
        self._store.delete(layout.SAVE_REQUEST_KEY)
