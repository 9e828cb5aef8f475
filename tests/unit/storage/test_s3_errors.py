# SPDX-License-Identifier: Apache-2.0
"""S3Store against a server that fails on purpose.

Real: boto3 and HTTP over loopback. Faked: the server's answers, from a script per test; time.
"""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

import pytest

from raydist.errors import ConfigError, ObjectMissingError, StorageError
from raydist.storage.s3 import S3Store
from raydist.testing.fake_clock import FakeClock
from raydist.testing.scripted_s3 import (
    Answer,
    ScriptedS3,
    answer,
    cut_body,
    error_answer,
    lose_reply,
    object_head,
    whole_object,
)

pytestmark = pytest.mark.usefixtures("aws_environment", "parsed_models")

OK = answer(200, ETag='"e"')
SLOW_DOWN = error_answer(503, "SlowDown")
EXPIRED = error_answer(400, "ExpiredToken")


# Passing failures


def test_put_slow_down_twice_then_ok(server: ScriptedS3, store: S3Store, clock: FakeClock) -> None:
    server.script = [SLOW_DOWN, SLOW_DOWN, OK]
    store.put("key", b"data")
    assert server.methods == ["PUT", "PUT", "PUT"]
    assert clock.monotonic_s() > 0
    assert server.requests[-1].body == b"data"


def test_put_slow_down_for_ever_ends_after_the_policy(
    server: ScriptedS3, store: S3Store, clock: FakeClock
) -> None:
    server.script = [SLOW_DOWN]
    with pytest.raises(StorageError, match="SlowDown"):
        store.put("key", b"data")
    assert server.methods == ["PUT"] * 4
    assert clock.monotonic_s() > 0


@pytest.mark.parametrize("cut", [cut_body, lose_reply])
def test_get_cut_body_is_read_again(server: ScriptedS3, store: S3Store, cut: Answer) -> None:
    server.script = [cut, whole_object(b"0123456789")]
    assert store.get("key") == b"0123456789"
    assert server.methods == ["GET", "GET"]


def test_get_from_a_server_without_ranges(server: ScriptedS3, store: S3Store) -> None:
    server.script = [answer(200, b"0123456789")]
    assert store.get("key", start=2, length=3) == b"234"


def test_size_one_failed_look_is_not_absence(server: ScriptedS3, store: S3Store) -> None:
    server.script = [answer(500), object_head(7)]
    assert store.size("key") == 7


def test_list_page_is_retried(server: ScriptedS3, store: S3Store) -> None:
    page = (
        b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>runs/a</Key>"
        b"<Size>3</Size></Contents><Contents><Key>runs/</Key><Size>0</Size></Contents>"
        b"</ListBucketResult>"
    )
    server.script = [SLOW_DOWN, answer(200, page)]
    assert list(store.list("")) == [("a", 3)]


def test_delete_of_a_missing_object_may_say_404(server: ScriptedS3, store: S3Store) -> None:
    server.script = [error_answer(404, "NoSuchKey")]
    store.delete("key")
    assert server.methods == ["DELETE"]


# Custom endpoints


def test_custom_endpoint_gets_no_checksum_and_path_style(
    server: ScriptedS3, store: S3Store
) -> None:
    server.script = [OK]
    store.put("a/key", b"data")
    request = server.requests[0]
    assert request.path == "/bucket/runs/a/key"
    assert not [name for name in request.headers if name.lower().startswith("x-amz-checksum")]
    assert "x-amz-trailer" not in request.headers
    assert request.body == b"data"


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"])
def test_endpoint_comes_from_the_environment(
    server: ScriptedS3, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, server.endpoint_url)
    server.script = [OK]
    S3Store("bucket").put("key", b"data")
    assert server.requests[0].path == "/bucket/key"


def test_endpoint_without_scheme_shows_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "127.0.0.1:9000")
    with pytest.raises(ConfigError) as caught:
        S3Store("bucket")
    assert "AWS_ENDPOINT_URL_S3=127.0.0.1:9000" in caught.value.problem
    assert "http://127.0.0.1:9000 or https://127.0.0.1:9000" in caught.value.way_out


@pytest.mark.parametrize(
    "endpoint_url", ["ftp://host", "http://", "http://host:notaport", "localhost:9000"]
)
def test_endpoint_that_is_no_http_server_is_refused(endpoint_url: str) -> None:
    with pytest.raises(ConfigError, match="endpoint_url="):
        S3Store("bucket", endpoint_url=endpoint_url)


def test_endpoint_with_credentials_is_refused_and_not_repeated(secret: str) -> None:
    with pytest.raises(ConfigError) as caught:
        S3Store("bucket", endpoint_url=f"http://user:{secret}@host:9000")
    assert secret not in str(caught.value)


# Credentials


def test_expired_token_reads_new_credentials_once(
    server: ScriptedS3, store: S3Store, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    def renew_and_refuse(handler: BaseHTTPRequestHandler) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-two")
        EXPIRED(handler)

    server.script = [renew_and_refuse, OK]
    store.put("key", b"data")
    signers = [request.headers["Authorization"] for request in server.requests]
    assert ["key-one/" in signers[0], "key-two/" in signers[1]] == [True, True]
    assert clock.monotonic_s() == 0


def test_expired_token_on_a_head_has_no_code(server: ScriptedS3, store: S3Store) -> None:
    server.script = [
        answer(400),
        answer(400),
        object_head(7),
    ]  # botocore asks for the region in between
    assert store.size("key") == 7
    assert server.methods == ["HEAD", "HEAD", "HEAD"]


def test_expired_token_twice_is_final(server: ScriptedS3, store: S3Store) -> None:
    server.script = [EXPIRED]
    with pytest.raises(StorageError, match="ExpiredToken") as caught:
        store.put("key", b"data")
    assert server.methods == ["PUT", "PUT"]
    assert "Renew the credentials" in caught.value.way_out


def test_no_credentials_is_final_and_says_what_to_set(
    server: ScriptedS3, store: S3Store, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageError, match="no credentials") as caught:
        store.put("key", b"data")
    assert "AWS_ACCESS_KEY_ID" in caught.value.way_out
    assert server.requests == []
    assert clock.monotonic_s() == 0


# Final failures


@pytest.mark.parametrize(
    ("status", "code", "way_out"),
    [
        (403, "AccessDenied", "s3:PutObject"),
        (404, "NoSuchBucket", "Create the bucket"),
        (403, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"),
        (403, "RequestTimeTooSkewed", "clock"),
        (418, "SomethingNew", "--storage"),
    ],
)
def test_final_answers_name_object_and_place_after_one_request(
    server: ScriptedS3, store: S3Store, secret: str, status: int, code: str, way_out: str
) -> None:
    server.script = [error_answer(status, code)]
    with pytest.raises(StorageError) as caught:
        store.put("a/key", b"data")
    text = str(caught.value)
    assert server.methods == ["PUT"]
    assert "s3://bucket/runs/a/key" in caught.value.problem
    assert server.endpoint_url in caught.value.problem
    assert code in caught.value.problem
    assert way_out in caught.value.way_out
    assert secret not in text
    assert "key-one" not in text


def test_get_denied_is_not_missing(server: ScriptedS3, store: S3Store) -> None:
    server.script = [error_answer(403, "AccessDenied")]
    with pytest.raises(StorageError, match="AccessDenied") as caught:
        store.get("key")
    assert not isinstance(caught.value, ObjectMissingError)


@pytest.mark.parametrize("code", ["NoSuchKey", "NoSuchBucket"])
def test_get_tells_a_missing_bucket_from_a_missing_object(
    server: ScriptedS3, store: S3Store, code: str
) -> None:
    server.script = [error_answer(404, code)]
    with pytest.raises(StorageError) as caught:
        store.get("key")
    assert isinstance(caught.value, ObjectMissingError) is (code == "NoSuchKey")


def test_size_in_a_bucket_that_may_not_be_looked_at(server: ScriptedS3, store: S3Store) -> None:
    server.script = [answer(404), answer(403), answer(404)]
    assert store.size("key") is None
    assert server.methods == ["HEAD", "HEAD"]


def test_unreachable_endpoint_names_it(
    make_store: Callable[..., S3Store], clock: FakeClock
) -> None:
    closed = "http://127.0.0.1:1"
    with pytest.raises(StorageError, match="Connection refused") as caught:
        make_store(closed).put("key", b"data")
    assert closed in caught.value.problem
    assert "AWS_ENDPOINT_URL_S3" in caught.value.way_out
    assert clock.monotonic_s() > 0
