# SPDX-License-Identifier: Apache-2.0
"""What a metrics sink remembers of a store that fails."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from raydist.errors import StorageError

_log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class StoreFailures:
    """The store's refusals: counted, logged once for each outage, raised by ``close``."""

    key: str
    """First segment of the attempt's rows."""
    num_failures: int = 0
    """Refusals so far."""
    last: Exception | None = None
    """The newest refusal, or None since the store took everything."""

    def note(self, error: Exception) -> None:
        """Count a refusal; the rows stay with the sink."""
        self.num_failures += 1
        if self.last is None:
            _log.warning("metrics of %s wait in memory, the store failed: %s", self.key, error)
        self.last = error

    def raise_last(self) -> None:
        """End with the outage, if there is one.

        Raises:
            StorageError: The last try failed.
        """
        if self.last is not None:
            raise StorageError(
                problem=f"The last metrics of {self.key} are not stored, after "
                f"{self.num_failures} failures: {self.last}"
            ) from self.last
