# SPDX-License-Identifier: Apache-2.0
"""How big objects are cut, and that no piece outlives a failure."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from raydist.storage.s3_read import FIRST_READ_BYTES, ChangedWhileReadError, Piece, read_object
from raydist.storage.s3_transfer import (
    MIB,
    MIN_PART_BYTES,
    part_size_bytes,
    run_all,
    spans,
    upload_parts,
)


@pytest.mark.parametrize(
    ("object_bytes", "expected"),
    [
        (1, 16 * MIB),
        (210_000_000_000, 23_333_334),
        (9_000 * 16 * MIB, 16 * MIB),
        (9_000 * 16 * MIB + 1, 16 * MIB + 1),
    ],
)
def test_part_size_keeps_under_the_part_limit(object_bytes: int, expected: int) -> None:
    part_bytes = part_size_bytes(object_bytes)
    assert part_bytes == expected
    assert -(-object_bytes // part_bytes) <= 9_000


def test_largest_s3_object_fits_in_parts_s3_takes() -> None:
    part_bytes = part_size_bytes(5 * 1024**4)
    assert part_bytes <= 5 * 1024**3
    assert -(-(5 * 1024**4) // part_bytes) <= 9_000


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 10, [(0, 4), (4, 8), (8, 10)]),
        (2, 10, [(2, 6), (6, 10)]),
        (0, 4, [(0, 4)]),
        (5, 5, []),
    ],
)
def test_spans_cover_the_interval_once(
    start: int, end: int, expected: list[tuple[int, int]]
) -> None:
    assert spans(start, end, 4) == expected


def test_run_all_returns_results_in_order() -> None:
    with ThreadPoolExecutor(3) as pool:
        assert run_all(pool, [lambda n=n: n * n for n in range(20)]) == [n * n for n in range(20)]


def test_run_all_more_tasks_than_threads_ends() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert run_all(pool, [lambda: 1] * 64) == [1] * 64


def test_run_all_failure_leaves_no_task_running() -> None:
    has_failed = threading.Event()
    running: set[int] = set()
    started: list[int] = []

    def slow(number: int) -> None:
        started.append(number)
        running.add(number)
        has_failed.wait()
        running.discard(number)

    def failing() -> None:
        has_failed.set()
        raise OSError("part 2")

    tasks = [lambda: slow(0), failing] + [lambda n=n: slow(n) for n in range(1, 50)]
    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(OSError, match="part 2"):
            run_all(pool, tasks)
        assert running == set()
        num_started = len(started)
    assert len(started) == num_started


class Versioned:
    """An object of ``object_bytes`` whose etag is given out by ``etags``, then stays."""

    def __init__(self, object_bytes: int, etags: list[str]) -> None:
        self.object_bytes = object_bytes
        self.etags = etags
        self.lock = threading.Lock()
        self.reads: list[tuple[int, int]] = []

    def read(self, start: int, length: int) -> Piece:
        with self.lock:
            etag = self.etags.pop(0) if len(self.etags) > 1 else self.etags[0]
            self.reads.append((start, length))
        end = min(start + length, self.object_bytes)
        return Piece(
            data=bytes([start // MIB % 251]) * max(0, end - start),
            object_bytes=self.object_bytes,
            etag=etag,
        )


def test_read_beyond_the_first_piece_goes_in_parallel_pieces() -> None:
    versioned = Versioned(70 * MIB, ["one"])
    with ThreadPoolExecutor(2) as pool:
        data = read_object(versioned.read, pool, 0, None)
    assert len(data) == 70 * MIB
    assert [data[at * MIB] for at in (0, 31, 32, 47, 48, 64, 69)] == [0, 0, 32, 32, 48, 64, 64]
    assert sorted(versioned.reads)[0] == (0, FIRST_READ_BYTES)
    assert len(versioned.reads) == 4


def test_read_across_two_versions_is_noticed() -> None:
    versioned = Versioned(70 * MIB, ["one", "one", "two"])
    with ThreadPoolExecutor(2) as pool, pytest.raises(ChangedWhileReadError):
        read_object(versioned.read, pool, 0, None)


class RecordedUploads:
    """Answers the requests of a multipart upload and keeps their arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def request(self, operation: str, **arguments: Any) -> dict[str, Any]:
        self.calls.append((operation, arguments))
        return {"UploadId": "u1", "ETag": "e", "ChecksumCRC32": "sum", "ChecksumCRC32C": "other"}


@pytest.mark.parametrize(
    ("algorithm", "asked", "part_keys"),
    [
        ("CRC32", {"ChecksumAlgorithm": "CRC32"}, {"PartNumber", "ETag", "ChecksumCRC32"}),
        (None, {}, {"PartNumber", "ETag"}),
    ],
)
def test_all_requests_of_an_upload_agree_on_the_checksum(
    algorithm: str | None, asked: dict[str, str], part_keys: set[str]
) -> None:
    uploads = RecordedUploads()
    completed: list[list[dict[str, Any]]] = []
    with ThreadPoolExecutor(1) as pool:
        upload_parts(
            uploads.request,
            pool,
            memoryview(b"x" * (MIN_PART_BYTES + 1)),
            lambda upload_id, parts: completed.append(parts),
            checksum_algorithm=algorithm,
        )
    assert [operation for operation, _ in uploads.calls] == [
        "create_multipart_upload",
        "upload_part",
        "upload_part",
    ]
    for _, arguments in uploads.calls:
        assert {k: v for k, v in arguments.items() if k.startswith("Checksum")} == asked
    assert [set(part) for part in completed[0]] == [part_keys, part_keys]
    assert [part["PartNumber"] for part in completed[0]] == [1, 2]
