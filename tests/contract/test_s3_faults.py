# SPDX-License-Identifier: Apache-2.0
"""S3Store against a real server that fails on purpose: each fault has one exact outcome.

Real: SeaweedFS, boto3, HTTP over loopback. Faked: what the proxy between them does.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from raydist.checkpoint.attempt import open_attempt
from raydist.checkpoint.journal import Journal
from raydist.checkpoint.manifest import Manifest, Progress
from raydist.checkpoint.ranges import LocalRange, TensorSpec, WantedRange
from raydist.checkpoint.restore import Restored, restore
from raydist.checkpoint.saver import RunIdentity, SaveOutcome, Saver
from raydist.errors import CheckpointError, ObjectExistsError, StorageError
from raydist.storage import s3_transfer
from raydist.storage.retry import RetryPolicy
from raydist.storage.s3 import S3Store
from raydist.storage.s3_body import MIB, RequestLimits
from raydist.storage.stale_uploads import StaleUpload
from raydist.testing.fake_clock import FakeClock
from raydist.testing.s3_faults import (
    Act,
    answer_200_with_error,
    answer_error,
    fail_after_it_happened,
    flip_in_reply,
    flip_in_request,
    hide_from_listing,
    never_answer,
    reset_in_reply,
    reset_in_request,
    trickle_reply,
    truncate_reply,
)
from raydist.testing.s3_proxy import Fault, S3Proxy
from raydist.testing.s3_server import S3Server
from raydist.testing.single_rank import SingleRank

POLICY = RetryPolicy(max_attempts=3, base_delay_s=0.01, max_delay_s=0.05, total_limit_s=20.0)
PATIENT = RequestLimits()
HASTY = RequestLimits(silence_s=0.5, slowest_bytes_per_s=MIB)
"""For replies that never come: all that waits in these tests."""
SMALL = random.Random(1).randbytes(3_000)
LARGE = random.Random(2).randbytes(10 * MIB + 5)  # three parts of the least size S3 takes
SLOW_DOWN = answer_error(503, "SlowDown")
UNANSWERED, DONE_UNANSWERED = never_answer(), never_answer(does_it=True)
TRICKLE = trickle_reply(every_s=0.05)
SILENT = (UNANSWERED, DONE_UNANSWERED, TRICKLE)


@pytest.fixture(scope="module")
def running_proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with S3Proxy(s3_server.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def proxy(
    running_proxy: S3Proxy, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[S3Proxy]:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    running_proxy.set_faults([])
    yield running_proxy
    running_proxy.set_faults([])


@pytest.fixture
def make_store(
    proxy: S3Proxy,
    s3_server: S3Server,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., S3Store]:
    name = f"faults/{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]}"
    monkeypatch.setattr(s3_transfer, "MIN_PART_BYTES", 5 * MIB)

    def make(limits: RequestLimits = PATIENT, endpoint_url: str = proxy.endpoint_url) -> S3Store:
        return S3Store(
            s3_server.bucket,
            name,
            endpoint_url=endpoint_url,
            policy=POLICY,
            limits=limits,
            rng=random.Random(0),
            multipart_from_bytes=6 * MIB,
        )

    return make


@pytest.fixture
def store(make_store: Callable[..., S3Store]) -> S3Store:
    return make_store()


def limits_for(act: Act) -> RequestLimits:
    return HASTY if act in SILENT else PATIENT


# A fault that passes: retried to success

PASSING_PUTS: dict[str, tuple[Act, int]] = {
    "slow down, a burst": (SLOW_DOWN, 2),
    "500 and nothing done": (answer_error(500, "InternalError"), 1),
    "500 after the body was taken": (fail_after_it_happened(), 1),
    "reset in the body": (reset_in_request(1_000), 1),
    "no reply, nothing done": (UNANSWERED, 1),
    "no reply, but done": (DONE_UNANSWERED, 1),
    "expired token": (answer_error(403, "ExpiredToken"), 1),
}


@pytest.mark.parametrize("if_absent", [False, True])
@pytest.mark.parametrize("name", PASSING_PUTS)
def test_put_under_a_passing_fault_writes_the_bytes(
    proxy: S3Proxy, make_store: Callable[..., S3Store], name: str, if_absent: bool
) -> None:
    act, times = PASSING_PUTS[name]
    store = make_store(limits_for(act))
    proxy.set_faults([Fault(act=act, operation="PutObject", times=times)])
    store.put("key", memoryview(SMALL), if_absent=if_absent)
    assert sum(one.was_hit for one in proxy.seen) == times
    assert store.get("key") == SMALL


PASSING_GETS: dict[str, tuple[Act, int]] = {
    "slow down, a burst": (SLOW_DOWN, 2),
    "reset in the reply": (reset_in_reply(1_000), 2),
    "truncated reply": (truncate_reply(2_998), 2),
    "empty reply": (truncate_reply(0), 1),
    "no reply": (UNANSWERED, 1),
    "a reply that trickles": (TRICKLE, 1),
    "expired token": (answer_error(403, "ExpiredToken"), 1),
}


@pytest.mark.parametrize("name", PASSING_GETS)
def test_get_under_a_passing_fault_gives_the_bytes(
    proxy: S3Proxy, make_store: Callable[..., S3Store], name: str
) -> None:
    act, times = PASSING_GETS[name]
    store = make_store(limits_for(act))
    store.put("key", SMALL)
    proxy.set_faults([Fault(act=act, operation="GetObject", times=times)])
    assert store.get("key", start=1, length=2_999) == SMALL[1:]
    assert sum(one.was_hit for one in proxy.seen) == times
    proxy.set_faults([Fault(act=act, operation="GetObject", times=times)])
    into = memoryview(bytearray(4_000))
    assert store.get("key", into=into) == 3_000
    assert into[:3_000] == SMALL
    assert proxy.operations() == ["GetObject"] * (times + 1)


PASSING_PARTS: dict[str, tuple[str, Act, int]] = {
    "parts slowed down": ("UploadPart", SLOW_DOWN, 2),
    "500 after a part was taken": ("UploadPart", fail_after_it_happened(), 1),
    "a part reset in its body": ("UploadPart", reset_in_request(5 * MIB), 2),
    "a part never answered": ("UploadPart", UNANSWERED, 1),
    "creation answered 500": ("CreateMultipartUpload", answer_error(500, "InternalError"), 1),
    "200 with an error": ("CompleteMultipartUpload", answer_200_with_error(), 2),
    "500 after completion": ("CompleteMultipartUpload", fail_after_it_happened(), 1),
    "completion never answered": ("CompleteMultipartUpload", DONE_UNANSWERED, 1),
}


@pytest.mark.parametrize("name", PASSING_PARTS)
def test_put_in_parts_under_a_passing_fault_writes_the_bytes_once(
    proxy: S3Proxy, make_store: Callable[..., S3Store], name: str
) -> None:
    operation, act, times = PASSING_PARTS[name]
    store = make_store(limits_for(act))
    proxy.set_faults([Fault(act=act, operation=operation, times=times)])
    store.put("key", memoryview(LARGE), if_absent=True)
    assert sum(one.was_hit for one in proxy.seen) == times
    proxy.set_faults([])
    assert store.get("key") == LARGE
    with pytest.raises(ObjectExistsError):
        store.put("key", LARGE, if_absent=True)
    assert open_uploads(store) == []


def open_uploads(store: S3Store) -> list[StaleUpload]:
    return store.stale_uploads("", older_than_s=0.0)


# A fault that stays: a named error within the policy's limits, never half an object


@pytest.mark.parametrize(
    ("act", "words", "num_attempts"),
    [
        (SLOW_DOWN, "SlowDown", 3),
        (answer_error(500, "InternalError"), "InternalError", 3),
        (reset_in_request(100), "lost or cut|unreachable", 3),
        (UNANSWERED, "lost or cut", 3),
        (answer_error(403, "ExpiredToken"), "ExpiredToken", 2),
        (answer_error(403, "AccessDenied"), "AccessDenied", 1),
        (answer_error(403, "RequestTimeTooSkewed"), "clock", 1),
        (answer_error(404, "NoSuchBucket"), "Create the bucket", 1),
    ],
)
def test_put_under_a_lasting_fault_is_a_named_error_and_no_object(
    proxy: S3Proxy, make_store: Callable[..., S3Store], act: Act, words: str, num_attempts: int
) -> None:
    store = make_store(limits_for(act))
    proxy.set_faults([Fault(act=act, operation="PutObject")])
    with pytest.raises(StorageError, match=words) as caught:
        store.put("key", SMALL)
    assert proxy.operations() == ["PutObject"] * num_attempts
    assert "raydist-secret-key" not in str(caught.value)
    assert store.size("key") is None


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (SLOW_DOWN, "SlowDown"),
        (reset_in_reply(10), "lost or cut"),
        (truncate_reply(2_000), "lost or cut"),
        (UNANSWERED, "lost or cut"),
        (TRICKLE, "lost or cut"),
    ],
)
def test_get_under_a_lasting_fault_is_a_named_error_after_three_attempts(
    proxy: S3Proxy, make_store: Callable[..., S3Store], act: Act, words: str
) -> None:
    store = make_store(limits_for(act))
    store.put("key", SMALL)
    proxy.set_faults([Fault(act=act, operation="GetObject")])
    with pytest.raises(StorageError, match=words):
        store.get("key", into=memoryview(bytearray(3_000)))
    assert proxy.operations() == ["GetObject"] * 3


@pytest.mark.parametrize(
    ("operation", "act", "words"),
    [
        ("UploadPart", SLOW_DOWN, "SlowDown"),
        ("UploadPart", reset_in_request(MIB), "lost or cut"),
        ("UploadPart", answer_error(403, "AccessDenied"), "AccessDenied"),
        ("CompleteMultipartUpload", answer_200_with_error(), "InternalError"),
        ("CompleteMultipartUpload", UNANSWERED, "lost or cut"),
    ],
)
def test_put_in_parts_under_a_lasting_fault_leaves_neither_object_nor_parts(
    proxy: S3Proxy, make_store: Callable[..., S3Store], operation: str, act: Act, words: str
) -> None:
    store = make_store(limits_for(act))
    proxy.set_faults([Fault(act=act, operation=operation)])
    with pytest.raises(StorageError, match=words):
        store.put("key", LARGE)
    assert proxy.operations()[-1] == "AbortMultipartUpload"
    proxy.set_faults([])
    assert store.size("key") is None
    assert open_uploads(store) == []


def test_upload_whose_abort_is_denied_too_is_found_and_removed_later(
    proxy: S3Proxy, store: S3Store
) -> None:
    denied = answer_error(403, "AccessDenied")
    proxy.set_faults(
        [
            Fault(act=SLOW_DOWN, operation="UploadPart", nth=2),
            Fault(act=denied, operation="AbortMultipartUpload"),
        ]
    )
    with pytest.raises(StorageError, match="SlowDown"):
        store.put("folder/key", LARGE)
    proxy.set_faults([])
    assert store.stale_uploads("folder/", older_than_s=3_600.0) == []
    assert store.stale_uploads("elsewhere/", older_than_s=0.0) == []
    (stale,) = store.stale_uploads("folder/", older_than_s=0.0)
    assert stale.key == "folder/key"
    store.abort_upload(stale)
    store.abort_upload(stale)
    assert open_uploads(store) == []
    assert store.size("folder/key") is None


def test_token_that_expires_in_the_middle_of_an_upload_ends_it_by_name(
    proxy: S3Proxy, store: S3Store
) -> None:
    proxy.set_faults([Fault(act=answer_error(403, "ExpiredToken"), nth=3)])
    with pytest.raises(StorageError, match="ExpiredToken") as caught:
        store.put("key", LARGE)
    assert "Renew the credentials" in caught.value.way_out
    proxy.set_faults([])
    assert store.size("key") is None


def test_delete_that_is_not_permitted_says_what_to_allow(proxy: S3Proxy, store: S3Store) -> None:
    store.put("key", SMALL)
    proxy.set_faults([Fault(act=answer_error(403, "AccessDenied"), operation="DeleteObject")])
    with pytest.raises(StorageError, match="s3:DeleteObject"):
        store.delete("key")
    assert store.get("key") == SMALL


def test_fault_begins_at_its_time_and_its_key_only(
    s3_server: S3Server, make_store: Callable[..., S3Store]
) -> None:
    clock = FakeClock()
    with S3Proxy(s3_server.endpoint_url, clock=clock) as proxy:
        fresh = make_store(endpoint_url=proxy.endpoint_url)
        denied = answer_error(403, "AccessDenied")
        proxy.set_faults([Fault(act=denied, key="rank-1", from_s=60.0)])
        fresh.put("rank-1", SMALL)
        clock.sleep(60.0)
        fresh.put("rank-2", SMALL)
        with pytest.raises(StorageError, match="AccessDenied"):
            fresh.put("rank-1", SMALL)


# What that means for checkpoints

SPEC = TensorSpec(key="master/weight", shape=(2_000,), dtype="F32")


def state(step: int) -> bytes:
    return random.Random(step).randbytes(8_000)


def save(store: S3Store, *steps: int) -> list[SaveOutcome]:
    attempt = open_attempt(run="r", store=store, driver="d", clock=FakeClock())
    attempt.release()
    saver = Saver(
        store=store,
        group=SingleRank(),
        attempt_number=attempt.number,
        attempt=attempt,
        identity=RunIdentity(
            run="r", strategy="ddp", precision="fp32", config_hash="", corpus="", versions={}
        ),
        max_abandoned=3,
    )
    progress = Progress(step=0, data_position=0, epoch=0, tokens=0, skipped_steps=0)
    return [
        saver.save(
            [LocalRange(spec=SPEC, offset=0, length=2_000, data=memoryview(state(step)))],
            progress=replace(progress, step=step),
            scalars={},
        )
        for step in steps
    ]


def restored(store: S3Store) -> Restored:
    def wanted(manifest: Manifest) -> Sequence[WantedRange]:
        return [WantedRange(spec=SPEC, offset=0, length=2_000)]

    journal = Journal(store)
    commit = journal.newest_commit(journal.tail())
    found = restore(store=store, group=SingleRank(), commit=commit, wanted=wanted)
    assert found is not None
    return found


def assert_step(found: Restored, step: int) -> None:
    assert found.manifest.progress.step == step
    assert bytes(found.buffers[SPEC.key]) == state(step)


def test_bytes_altered_in_one_reply_are_read_again(proxy: S3Proxy, store: S3Store) -> None:
    save(store, 10, 20)
    flip = Fault(act=flip_in_reply(5_000), operation="GetObject", key="safetensors", times=1)
    proxy.set_faults([flip])
    found = restored(store)
    assert_step(found, 20)
    assert found.skipped == ()
    assert [one.was_hit for one in proxy.seen].count(True) == 1


def test_bytes_altered_in_every_reply_fall_back_to_the_commit_before(
    proxy: S3Proxy, store: S3Store
) -> None:
    save(store, 10, 20)
    flip = flip_in_reply(5_000)
    proxy.set_faults([Fault(act=flip, operation="GetObject", key="step-000000000020.*safetensors")])
    found = restored(store)
    assert_step(found, 10)
    assert "does not match its CRC32C" in found.skipped[0]
    proxy.set_faults([Fault(act=flip, operation="GetObject", key="safetensors")])
    with pytest.raises(CheckpointError, match="No checkpoint of this run verifies"):
        restored(store)


def test_bytes_altered_on_their_way_to_the_store_are_never_restored(
    proxy: S3Proxy, store: S3Store
) -> None:
    save(store, 10)
    proxy.set_faults([Fault(act=flip_in_request(5_000), operation="PutObject", key="safetensors")])
    assert save(store, 20)[0].committed
    proxy.set_faults([])
    assert_step(restored(store), 10)


@pytest.mark.parametrize("act", [fail_after_it_happened(), DONE_UNANSWERED, UNANSWERED, SLOW_DOWN])
def test_commit_whose_reply_is_lost_is_found_out_by_reading(
    proxy: S3Proxy, make_store: Callable[..., S3Store], act: Act
) -> None:
    store = make_store(limits_for(act))
    save(store, 10)
    proxy.set_faults([Fault(act=act, operation="PutObject", key="journal/0000", times=2)])
    assert [outcome.committed for outcome in save(store, 20, 30)] == [True, True]
    assert_step(restored(store), 30)


def test_save_whose_part_the_store_refuses_is_abandoned_and_the_next_commits(
    proxy: S3Proxy, store: S3Store
) -> None:
    proxy.set_faults(
        [Fault(act=SLOW_DOWN, operation="PutObject", key="step-000000000020.*safetensors")]
    )
    outcomes = save(store, 10, 20, 30)
    assert [outcome.committed for outcome in outcomes] == [True, False, True]
    assert "SlowDown" in outcomes[1].why
    assert_step(restored(store), 30)


def test_listing_that_lags_hides_nothing_from_a_resume(proxy: S3Proxy, store: S3Store) -> None:
    save(store, 10, 20)
    proxy.set_faults([Fault(act=hide_from_listing("step-000000000020"), operation="ListObjectsV2")])
    keys = [key for key, _ in store.list("checkpoints/")]
    assert ["step-000000000010" in key for key in keys] == [True, True]
    proxy.set_faults([Fault(act=answer_error(403, "AccessDenied"), operation="ListObjectsV2")])
    assert_step(restored(store), 20)
    assert "ListObjectsV2" not in proxy.operations()
