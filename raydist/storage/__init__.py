# SPDX-License-Identifier: Apache-2.0
"""Bytes on a local directory, on S3 or in memory, behind one protocol."""

from raydist.storage.open import open_store
from raydist.storage.store import ObjectStore

__all__ = ["ObjectStore", "open_store"]
