# SPDX-License-Identifier: Apache-2.0
"""Writes whose outcome is in doubt, and writes in parts that fail.

Real: boto3 and HTTP over loopback. Faked: the server's answers, from a script per test; time.
"""

from __future__ import annotations

import pytest

from raydist.errors import ObjectExistsError, StorageError
from raydist.storage.s3 import S3Store
from raydist.testing.scripted_s3 import (
    Answer,
    ScriptedS3,
    answer,
    error_answer,
    lose_reply,
    object_head,
    whole_object,
)

OK = answer(200, ETag='"e"')
DENIED = error_answer(403, "AccessDenied")
TAKEN = error_answer(412, "PreconditionFailed")
UPLOAD_MADE = answer(
    200,
    b"<InitiateMultipartUploadResult><UploadId>u1</UploadId></InitiateMultipartUploadResult>",
)
UPLOAD_DONE = answer(200, b"<CompleteMultipartUploadResult/>")


# A create whose reply was lost


@pytest.mark.parametrize(
    "loss", [lose_reply, error_answer(500, "InternalError"), error_answer(503, "SlowDown")]
)
def test_create_lost_reply_then_412_is_ours_when_the_bytes_are(
    server: ScriptedS3, store: S3Store, loss: Answer
) -> None:
    server.script = [loss, TAKEN, object_head(4), whole_object(b"mine")]
    store.put("journal/1", b"mine", if_absent=True)
    assert server.methods == ["PUT", "PUT", "HEAD", "GET"]


@pytest.mark.parametrize(
    "other", [[object_head(5)], [object_head(4), whole_object(b"them")], [answer(404), answer(200)]]
)
def test_create_lost_reply_then_412_is_theirs_when_the_bytes_are(
    server: ScriptedS3, store: S3Store, other: list[Answer]
) -> None:
    server.script = [lose_reply, TAKEN, *other]
    with pytest.raises(ObjectExistsError) as caught:
        store.put("journal/1", b"mine", if_absent=True)
    assert caught.value.key == "journal/1"


def test_create_412_at_once_is_theirs_without_reading(server: ScriptedS3, store: S3Store) -> None:
    server.script = [TAKEN]
    with pytest.raises(ObjectExistsError):
        store.put("journal/1", b"mine", if_absent=True)
    assert server.methods == ["PUT"]
    assert server.requests[0].headers["If-None-Match"] == "*"


def test_create_conflict_then_412_is_theirs(server: ScriptedS3, store: S3Store) -> None:
    server.script = [error_answer(409, "ConditionalRequestConflict"), TAKEN]
    with pytest.raises(ObjectExistsError):
        store.put("journal/1", b"mine", if_absent=True)
    assert server.methods == ["PUT", "PUT"]


def test_create_conflict_then_free_succeeds(server: ScriptedS3, store: S3Store) -> None:
    server.script = [error_answer(409, "ConditionalRequestConflict"), OK]
    store.put("journal/1", b"mine", if_absent=True)
    assert server.methods == ["PUT", "PUT"]


# Multipart


def test_multipart_carries_the_condition_on_completion(
    server: ScriptedS3, multipart_store: S3Store
) -> None:
    server.script = [UPLOAD_MADE, OK, UPLOAD_DONE]
    multipart_store.put("key", b"data", if_absent=True)
    assert server.methods == ["POST", "PUT", "POST"]
    assert "If-None-Match" not in server.requests[1].headers
    assert server.requests[2].headers["If-None-Match"] == "*"


def test_multipart_failed_part_is_aborted(server: ScriptedS3, multipart_store: S3Store) -> None:
    server.script = [UPLOAD_MADE, DENIED, answer(204)]
    with pytest.raises(StorageError, match="AccessDenied"):
        multipart_store.put("key", b"data")
    assert server.methods == ["POST", "PUT", "DELETE"]
    assert "uploadId=u1" in server.requests[-1].path


def test_multipart_abort_that_fails_too_keeps_the_first_error(
    server: ScriptedS3, multipart_store: S3Store
) -> None:
    server.script = [UPLOAD_MADE, DENIED, error_answer(403, "AccessDeniedForAbort")]
    with pytest.raises(StorageError, match="AccessDenied,"):
        multipart_store.put("key", b"data")


@pytest.mark.parametrize(
    ("if_absent", "echo"),
    [
        (True, TAKEN),
        (True, error_answer(404, "NoSuchUpload")),
        (False, error_answer(404, "NoSuchUpload")),
    ],
)
def test_multipart_lost_completion_is_settled_by_reading(
    server: ScriptedS3, multipart_store: S3Store, if_absent: bool, echo: Answer
) -> None:
    server.script = [UPLOAD_MADE, OK, lose_reply, echo, object_head(4), whole_object(b"data")]
    multipart_store.put("key", b"data", if_absent=if_absent)
    assert server.methods == ["POST", "PUT", "POST", "POST", "HEAD", "GET"]


def test_multipart_taken_key_is_refused_and_aborted(
    server: ScriptedS3, multipart_store: S3Store
) -> None:
    server.script = [UPLOAD_MADE, OK, TAKEN, answer(204)]
    with pytest.raises(ObjectExistsError):
        multipart_store.put("key", b"data", if_absent=True)
    assert server.methods == ["POST", "PUT", "POST", "DELETE"]
