# SPDX-License-Identifier: Apache-2.0
"""The ObjectStore contract, held to by every store.

Real: the local filesystem, and SeaweedFS over loopback as S3. Faked: nothing.
"""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable

import pytest

from raydist.errors import ConfigError, ObjectExistsError, ObjectMissingError, StorageError
from raydist.storage import ObjectStore, open_store
from raydist.storage.open import check_writable

MIB = 1 << 20


def run_together(num_threads: int, work: Callable[[int], None]) -> list[Exception | None]:
    """Run ``work(index)`` on threads released at once; return what each raised."""
    barrier = threading.Barrier(num_threads)
    outcomes: list[Exception | None] = [None] * num_threads

    def run(index: int) -> None:
        barrier.wait()
        try:
            work(index)
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_put_then_get_returns_the_bytes(store: ObjectStore) -> None:
    store.put("run/a/part.bin", b"0123456789")
    assert store.get("run/a/part.bin") == b"0123456789"
    assert type(store.get("run/a/part.bin")) is bytes


def test_put_takes_a_memoryview_of_any_item_size(store: ObjectStore) -> None:
    numbers = memoryview(bytearray(range(64))).cast("I")
    store.put("view", numbers)
    assert store.get("view") == bytes(range(64))


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [
        (0, 4, b"0123"),
        (3, 4, b"3456"),
        (7, None, b"789"),
        (7, 100, b"789"),
        (9, 1, b"9"),
        (10, None, b""),
        (10, 5, b""),
        (50, 5, b""),
        (4, 0, b""),
        (0, None, b"0123456789"),
    ],
)
def test_get_range_is_cut_at_the_end(
    store: ObjectStore, start: int, length: int | None, expected: bytes
) -> None:
    store.put("digits", b"0123456789")
    assert store.get("digits", start=start, length=length) == expected


@pytest.mark.parametrize(
    ("start", "room", "expected"),
    [
        (0, 10, b"0123456789"),
        (3, 4, b"3456"),
        (7, 100, b"789"),
        (10, 5, b""),
        (50, 5, b""),
        (4, 0, b""),
    ],
)
def test_get_into_fills_the_view_and_counts_up_to_the_end(
    store: ObjectStore, start: int, room: int, expected: bytes
) -> None:
    store.put("digits", b"0123456789")
    memory = bytearray(b"x" * room)
    assert store.get("digits", start=start, into=memoryview(memory)) == len(expected)
    assert memory == expected + b"x" * (room - len(expected))


def test_get_into_takes_a_view_of_any_item_size(store: ObjectStore) -> None:
    store.put("numbers", bytes(range(64)))
    memory = bytearray(64)
    assert store.get("numbers", into=memoryview(memory).cast("I")) == 64
    assert memory == bytes(range(64))


@pytest.mark.parametrize(("start", "room"), [(0, 4), (0, 0)])
def test_get_into_of_a_missing_object_names_the_key(
    store: ObjectStore, start: int, room: int
) -> None:
    with pytest.raises(ObjectMissingError) as caught:
        store.get("no/such", start=start, into=memoryview(bytearray(room)))
    assert caught.value.key == "no/such"


@pytest.mark.parametrize(("start", "length"), [(-1, None), (0, -1)])
def test_get_backwards_range_is_refused(store: ObjectStore, start: int, length: int | None) -> None:
    store.put("digits", b"0123456789")
    with pytest.raises(ConfigError):
        store.get("digits", start=start, length=length)


@pytest.mark.parametrize("length", [None, 5, 0])
def test_get_missing_object_names_the_key(store: ObjectStore, length: int | None) -> None:
    with pytest.raises(ObjectMissingError) as caught:
        store.get("no/such", length=length)
    assert caught.value.key == "no/such"
    assert isinstance(caught.value, StorageError)


def test_size_counts_bytes_or_is_none(store: ObjectStore) -> None:
    store.put("folder/nine", b"123456789")
    assert store.size("folder/nine") == 9
    assert store.size("folder/ten") is None
    assert store.size("folder") is None
    assert store.size("folder/nine/below") is None


def test_a_folder_is_no_object(store: ObjectStore) -> None:
    store.put("folder/object", b"x")
    with pytest.raises(ObjectMissingError):
        store.get("folder")
    store.delete("folder")
    assert store.get("folder/object") == b"x"


def test_empty_object_exists(store: ObjectStore) -> None:
    store.put("empty", b"")
    assert store.size("empty") == 0
    assert store.get("empty") == b""
    assert store.get("empty", length=3) == b""
    assert list(store.list("")) == [("empty", 0)]


def test_overwrite_replaces_the_whole_object(store: ObjectStore) -> None:
    store.put("latest", b"a longer first version")
    store.put("latest", b"second")
    assert store.get("latest") == b"second"
    assert store.size("latest") == 6


def test_list_sorts_and_takes_any_prefix(store: ObjectStore) -> None:
    keys = ["b/2", "b/10", "b/1", "b.txt", "a", "b/c/d", "bb/x"]
    for index, key in enumerate(keys):
        store.put(key, b"x" * index)
    sizes = {key: index for index, key in enumerate(keys)}
    assert list(store.list("")) == [(key, sizes[key]) for key in sorted(keys)]
    assert [key for key, _ in store.list("b/")] == ["b/1", "b/10", "b/2", "b/c/d"]
    assert [key for key, _ in store.list("b/1")] == ["b/1", "b/10"]
    assert [key for key, _ in store.list("b")] == ["b.txt", "b/1", "b/10", "b/2", "b/c/d", "bb/x"]
    assert list(store.list("nothing/here")) == []


def test_list_goes_past_one_page_of_s3(s3_url: str) -> None:
    store = open_store(s3_url)
    keys = [f"many/{index:04d}" for index in range(1003)]

    def put_some(offset: int) -> None:
        for key in keys[offset::4]:
            store.put(key, b"")

    assert run_together(4, put_some) == [None] * 4
    assert [key for key, _ in store.list("many/")] == keys


def test_delete_removes_and_tolerates_missing(store: ObjectStore) -> None:
    store.put("gone/soon", b"x")
    store.delete("gone/soon")
    store.delete("gone/soon")
    store.delete("never/was/there")
    assert store.size("gone/soon") is None
    assert list(store.list("")) == []


def test_put_if_absent_second_creator_is_refused(store: ObjectStore) -> None:
    store.put("journal/0", b"first", if_absent=True)
    with pytest.raises(ObjectExistsError) as caught:
        store.put("journal/0", b"second", if_absent=True)
    assert caught.value.key == "journal/0"
    assert store.get("journal/0") == b"first"


def test_put_if_absent_same_bytes_are_refused_too(store: ObjectStore) -> None:
    store.put("journal/0", b"same", if_absent=True)
    with pytest.raises(ObjectExistsError):
        store.put("journal/0", b"same", if_absent=True)


def test_put_if_absent_after_delete_creates_again(store: ObjectStore) -> None:
    store.put("journal/0", b"first", if_absent=True)
    store.delete("journal/0")
    store.put("journal/0", b"second", if_absent=True)
    assert store.get("journal/0") == b"second"


def test_create_race_has_exactly_one_winner(store: ObjectStore) -> None:
    for number in range(3):
        key = f"journal/{number:08d}.json"
        outcomes = run_together(
            8, lambda index, key=key: store.put(key, b"writer %d" % index, if_absent=True)
        )
        winners = [index for index, error in enumerate(outcomes) if error is None]
        losers = [error for error in outcomes if error is not None]
        assert len(winners) == 1
        assert all(isinstance(error, ObjectExistsError) for error in losers)
        assert store.get(key) == b"writer %d" % winners[0]


def test_readers_see_whole_versions_only(store: ObjectStore) -> None:
    versions = [bytes([number]) * (200_000 + 1_000 * number) for number in range(12)]
    store.put("versions", versions[0])
    is_over = threading.Event()

    def work(index: int) -> None:
        if index == 0:
            try:
                for version in versions:
                    store.put("versions", version)
            finally:
                is_over.set()
            return
        while not is_over.is_set():
            assert store.get("versions") in versions

    assert run_together(3, work) == [None] * 3
    assert store.get("versions") == versions[-1]
    assert [key for key, _ in store.list("")] == ["versions"]


@pytest.mark.parametrize(
    "key",
    ["", "/absolute", "a/../b", "..", "./a", "a/.", "a//b", "a/", "a/.tmp-1", "nul\0"],
)
def test_keys_that_could_leave_the_root_are_refused(store: ObjectStore, key: str) -> None:
    with pytest.raises(ConfigError):
        store.put(key, b"x")
    with pytest.raises(ConfigError):
        store.get(key)
    with pytest.raises(ConfigError):
        store.size(key)
    with pytest.raises(ConfigError):
        store.delete(key)
    assert list(store.list("")) == []


@pytest.mark.parametrize("prefix", ["/etc/", "../", "a/../b"])
def test_prefixes_that_could_leave_the_root_are_refused(store: ObjectStore, prefix: str) -> None:
    with pytest.raises(ConfigError):
        list(store.list(prefix))


def test_keys_with_odd_characters_round_trip(store: ObjectStore) -> None:
    keys = ["späth/a b+c&d=e%2F?#", "x/~$@!*'(),;:"]
    for key in keys:
        store.put(key, key.encode())
    assert [store.get(key) for key in keys] == [key.encode() for key in keys]
    assert [key for key, _ in store.list("")] == sorted(keys)


def test_object_over_64_mib_round_trips(store: ObjectStore) -> None:
    data = random.Random(0).randbytes(65 * MIB + 12_345)
    store.put("big", memoryview(data), if_absent=True)
    assert store.size("big") == len(data)
    assert store.get("big") == data
    assert store.get("big", start=MIB - 1, length=40 * MIB) == data[MIB - 1 : 41 * MIB - 1]
    assert store.get("big", start=64 * MIB) == data[64 * MIB :]
    memory = bytearray(70 * MIB)
    assert store.get("big", start=MIB, into=memoryview(memory)) == len(data) - MIB
    assert memory[: len(data) - MIB] == data[MIB:]
    with pytest.raises(ObjectExistsError):
        store.put("big", data[::-1], if_absent=True)
    assert store.get("big", length=100) == data[:100]


def test_s3_store_is_not_pickled(s3_url: str) -> None:
    store = open_store(s3_url)
    with pytest.raises(TypeError, match="open_store"):
        pickle.dumps(store)


def test_check_writable_leaves_nothing_in_the_bucket(s3_url: str) -> None:
    check_writable(s3_url)
    assert list(open_store(s3_url).list("")) == []


def test_s3_bucket_that_is_not_there_is_an_error_for_every_method(s3_url: str) -> None:
    del s3_url  # only its environment
    store = open_store("s3://raydist-no-such-bucket/runs")
    calls: list[Callable[[], object]] = [
        lambda: store.size("key"),
        lambda: store.get("key"),
        lambda: store.put("key", b"x"),
        lambda: list(store.list("")),
    ]
    for call in calls:
        with pytest.raises(StorageError, match="NoSuchBucket") as caught:
            call()
        assert not isinstance(caught.value, ObjectMissingError)
        assert "--storage" in caught.value.way_out
