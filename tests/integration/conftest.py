# SPDX-License-Identifier: Apache-2.0
"""One real S3 server for all integration tests that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raydist.testing.s3_server import S3Server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server
