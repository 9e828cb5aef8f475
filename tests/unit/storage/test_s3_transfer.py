# SPDX-License-Identifier: Apache-2.0
"""How big objects are cut, and that no piece outlives a failure."""

from __future__ import annotations

import base64
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import IncompleteReadError, ReadTimeoutError

from raydist.checkpoint.objects import crc32c
from raydist.storage.s3_body import BodyView, RequestLimits, receive
from raydist.storage.s3_client import is_private_line
from raydist.storage.s3_read import (
    FIRST_READ_BYTES,
    ChangedWhileReadError,
    Piece,
    read_object,
    read_object_into,
)
from raydist.storage.s3_transfer import (
    MIB,
    MIN_PART_BYTES,
    part_size_bytes,
    run_all,
    spans,
    upload_parts,
)
from raydist.testing.fake_clock import FakeClock


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

    def read(self, start: int, length: int, into: memoryview | None = None) -> Piece:
        with self.lock:
            etag = self.etags.pop(0) if len(self.etags) > 1 else self.etags[0]
            self.reads.append((start, length))
        end = min(start + length, self.object_bytes)
        data = bytes([start // MIB % 251]) * max(0, end - start)
        if into is not None:
            into[: len(data)] = data
        return Piece(
            data=data if into is None else into[: len(data)],
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


def test_read_into_fills_the_view_and_counts_what_there_is() -> None:
    versioned = Versioned(70 * MIB, ["one"])
    into = memoryview(bytearray(80 * MIB))
    with ThreadPoolExecutor(2) as pool:
        count = read_object_into(versioned.read, pool, 10 * MIB, into)
    assert count == 60 * MIB
    assert [into[at * MIB] for at in (0, 31, 32, 47, 48, 59, 60)] == [10, 10, 42, 42, 58, 58, 0]


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
        return {"UploadId": "u1", "ETag": "e"}


def crc32c_header(data: bytes) -> str:
    return base64.b64encode(crc32c(data).to_bytes(4, "big")).decode()


@pytest.mark.parametrize("has_checksums", [True, False])
def test_all_requests_of_an_upload_agree_on_the_checksum(has_checksums: bool) -> None:
    uploads = RecordedUploads()
    completed: list[list[dict[str, Any]]] = []
    data = random.Random(1).randbytes(MIN_PART_BYTES + 1)
    with ThreadPoolExecutor(1) as pool:
        upload_parts(
            uploads.request,
            pool,
            memoryview(data),
            lambda upload_id, parts: completed.append(parts),
            has_checksums=has_checksums,
        )
    assert [operation for operation, _ in uploads.calls] == [
        "create_multipart_upload",
        "upload_part",
        "upload_part",
    ]
    sums = [crc32c_header(data[:MIN_PART_BYTES]), crc32c_header(data[MIN_PART_BYTES:])]
    asked = [{k: v for k, v in one.items() if k.startswith("Check")} for _, one in uploads.calls]
    due = [{"ChecksumAlgorithm": "CRC32C"}, *({"ChecksumCRC32C": value} for value in sums)]
    assert asked == (due if has_checksums else [{}, {}, {}])
    assert [part.get("ChecksumCRC32C") for part in completed[0]] == (
        sums if has_checksums else [None, None]
    )
    assert [(part["PartNumber"], part["ETag"]) for part in completed[0]] == [(1, "e"), (2, "e")]


def test_parts_are_views_of_the_object_not_copies() -> None:
    uploads = RecordedUploads()
    data = bytearray(2 * MIN_PART_BYTES)
    with ThreadPoolExecutor(2) as pool:
        upload_parts(uploads.request, pool, memoryview(data), lambda *_: None, has_checksums=False)
    bodies = {
        arguments["PartNumber"]: arguments["Body"]
        for operation, arguments in uploads.calls
        if operation == "upload_part"
    }
    data[0], data[MIN_PART_BYTES] = 1, 2
    assert [bodies[1][0], bodies[2][0]] == [1, 2]


# The body of a request


def test_body_is_handed_out_as_views_of_at_least_a_mebibyte() -> None:
    data = bytearray(MIB + 5)
    body = BodyView(memoryview(data))
    assert len(body) == MIB + 5
    pieces = [body.read(16384), body.read(16384), body.read(16384)]
    assert [piece.nbytes for piece in pieces] == [MIB, 5, 0]
    data[0] = 7
    assert pieces[0][0] == 7


def test_body_rewinds_and_tells_its_length_by_seeking() -> None:
    body = BodyView(memoryview(b"0123456789"))
    assert bytes(body.read()) == b"0123456789"
    assert [body.seek(0, os.SEEK_END), body.tell()] == [10, 10]
    assert [body.seek(3), body.tell(), bytes(body.read(-1))] == [3, 3, b"3456789"]
    assert body.seek(-2, os.SEEK_CUR) == 8


@pytest.mark.parametrize(
    ("endpoint_url", "is_private"),
    [
        (None, True),
        ("https://store.example:9000", True),
        ("http://127.0.0.1:9000", True),
        ("http://127.8.8.8", True),
        ("http://[::1]:9000", True),
        ("http://localhost:9000", True),
        ("http://10.0.0.5:9000", False),
        ("http://store.example", False),
        ("http://localhost.example", False),
    ],
)
def test_bodies_go_unsigned_only_where_nobody_can_alter_them(
    endpoint_url: str | None, is_private: bool
) -> None:
    assert is_private_line(endpoint_url) is is_private


# The body of a reply


class TricklingBody:
    """A reply's body that gives a byte at a time; each takes 10 s."""

    def __init__(self, data: bytes, clock: FakeClock) -> None:
        self.data = data
        self.clock = clock
        self.is_closed = False

    def __enter__(self) -> TricklingBody:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def read1(self, count: int) -> bytes:
        self.clock.sleep(10.0)
        piece, self.data = self.data[:1], self.data[1:]
        return piece


def test_reply_that_trickles_is_given_up_in_bounded_time() -> None:
    clock = FakeClock()
    body = TricklingBody(bytes(1000), clock)
    with pytest.raises(ReadTimeoutError, match="trickles"):
        receive(body, memoryview(bytearray(1000)), RequestLimits(), clock.monotonic_s)
    assert body.is_closed
    assert 30.0 < clock.monotonic_s() <= RequestLimits().reply_s(1000) + 10.0


def test_reply_that_is_slow_but_ends_in_time_is_taken() -> None:
    clock = FakeClock()
    into = memoryview(bytearray(3))
    receive(TricklingBody(b"abc", clock), into, RequestLimits(), clock.monotonic_s)
    assert bytes(into) == b"abc"


def test_reply_that_ends_early_says_how_far_it_came() -> None:
    clock = FakeClock()
    with pytest.raises(IncompleteReadError, match=r"2 read.* 4"):
        receive(
            TricklingBody(b"ab", clock),
            memoryview(bytearray(4)),
            RequestLimits(),
            clock.monotonic_s,
        )


def test_limit_of_a_reply_grows_with_its_bytes() -> None:
    assert RequestLimits().reply_s(0) == 30.0
    assert RequestLimits().reply_s(16 * MIB) == 30.0 + 128.0
