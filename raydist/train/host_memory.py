# SPDX-License-Identifier: Apache-2.0
"""Giving host memory back while a model is built."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

# Source: <malloc.h> of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_SMALL_BYTES = 1 << 20
_LARGEST_BYTES = 32 << 20  # where glibc's own adjustment ends


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Return freed tensors to the system while this lasts.

    glibc keeps freed blocks of up to 32 MiB for later, so a rank that creates one layer after
    another and keeps its part of each grows to several times that part. Afterwards blocks are
    kept as before: a training step uses the same sizes again and again. Elsewhere: no effect.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _SMALL_BYTES)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_BYTES)
