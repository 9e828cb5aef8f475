# SPDX-License-Identifier: Apache-2.0
"""Where Ray Train keeps its own small state: below the run, reached as raydist reaches it."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from raydist.storage.open import parse_url


def ray_storage(run_url: str) -> dict[str, Any]:
    """Return storage_path (and a filesystem for S3) for Ray Train's RunConfig."""
    location = parse_url(run_url)
    if location.bucket is None:
        return {"storage_path": os.path.join(location.path, "ray")}
    from pyarrow import fs

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    options: dict[str, Any] = {}
    if endpoint:
        parts = urlsplit(endpoint)
        options = {"endpoint_override": parts.netloc, "scheme": parts.scheme}
    return {
        "storage_path": f"{location.bucket}/{location.path}/ray",
        "storage_filesystem": fs.S3FileSystem(**options),
    }
