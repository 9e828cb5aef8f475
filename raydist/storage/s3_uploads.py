# SPDX-License-Identifier: Apache-2.0
"""Uploads in parts that a killed writer left open: found by listing, ended by hand."""

from __future__ import annotations

from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

from botocore.exceptions import ClientError

from raydist.storage.s3_errors import failure_of
from raydist.storage.s3_requests import BucketRequests
from raydist.storage.stale_uploads import StaleUpload


def stale_uploads(
    requests: BucketRequests, prefix: str, *, older_than_s: float
) -> list[StaleUpload]:
    """Return the open uploads whose keys start with ``prefix``, oldest first.

    Raises:
        StorageError: A request failed for good.
    """
    root = requests.name("")
    found: list[StaleUpload] = []
    page_of: dict[str, str] = {}
    while True:
        listing = partial(requests.once, "list_multipart_uploads", Prefix=root + prefix, **page_of)
        page = requests.retrying("list the uploads of", prefix, listing)
        for item in page.get("Uploads", ()):
            age_s = (_store_time(page) - item["Initiated"]).total_seconds()
            if age_s >= older_than_s:
                key = item["Key"].removeprefix(root)
                found.append(StaleUpload(key=key, upload_id=item["UploadId"], age_s=age_s))
        if not page.get("IsTruncated"):
            return sorted(found, key=lambda upload: -upload.age_s)
        page_of = {
            "KeyMarker": page["NextKeyMarker"],
            "UploadIdMarker": page["NextUploadIdMarker"],
        }


def abort_upload(requests: BucketRequests, upload: StaleUpload) -> None:
    """Abort ``upload``; one that is gone already is no error.

    Raises:
        StorageError: A request failed for good.
    """

    def attempt() -> None:
        try:
            requests.on_object("abort_multipart_upload", upload.key, UploadId=upload.upload_id)
        except ClientError as error:
            if failure_of(error).code != "NoSuchUpload":
                raise

    requests.retrying("abort the upload of", upload.key, attempt)


def _store_time(page: dict[str, Any]) -> datetime:
    """Return when the store answered, by its own clock: this machine's may be wrong."""
    return parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
