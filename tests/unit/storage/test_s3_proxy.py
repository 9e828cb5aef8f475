# SPDX-License-Identifier: Apache-2.0
"""What S3Proxy calls a request. With a real server behind it, every fault test is its test."""

from __future__ import annotations

import pytest

from raydist.testing.s3_proxy import operation_of


@pytest.mark.parametrize(
    ("method", "path", "query", "operation"),
    [
        ("PUT", "/bucket/a/key", "", "PutObject"),
        ("GET", "/bucket/a/key", "", "GetObject"),
        ("HEAD", "/bucket/a/key", "", "HeadObject"),
        ("DELETE", "/bucket/key", "", "DeleteObject"),
        ("POST", "/bucket/key", "uploads", "CreateMultipartUpload"),
        ("PUT", "/bucket/key", "uploadId=u&partNumber=3", "UploadPart"),
        ("POST", "/bucket/key", "uploadId=u", "CompleteMultipartUpload"),
        ("DELETE", "/bucket/key", "uploadId=u", "AbortMultipartUpload"),
        ("GET", "/bucket", "uploads&prefix=a", "ListMultipartUploads"),
        ("GET", "/bucket", "list-type=2&prefix=runs", "ListObjectsV2"),
        ("GET", "/bucket/", "list-type=2", "ListObjectsV2"),
        ("HEAD", "/bucket", "", "HeadBucket"),
    ],
)
def test_request_is_called_by_its_s3_name(
    method: str, path: str, query: str, operation: str
) -> None:
    assert operation_of(method, path, query) == operation
