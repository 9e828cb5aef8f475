# SPDX-License-Identifier: Apache-2.0
"""A store on a scripted server, with known credentials and a clock that stands still."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import botocore.session
import pytest
from botocore.loaders import Loader, create_loader

from raydist.storage.retry import RetryPolicy
from raydist.storage.s3 import S3Store
from raydist.testing.fake_clock import FakeClock
from raydist.testing.scripted_s3 import ScriptedS3


@pytest.fixture
def server() -> Iterator[ScriptedS3]:
    with ScriptedS3() as scripted:
        yield scripted


@pytest.fixture
def secret() -> str:
    return "secret-that-must-not-be-shown"


@pytest.fixture
def aws_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, secret: str) -> None:
    """Known credentials, and none of the developer's own."""
    for name in ("PROFILE", "SESSION_TOKEN", "ENDPOINT_URL", "ENDPOINT_URL_S3", "CA_BUNDLE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-one")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-test-1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="session")
def service_models() -> Loader:
    return create_loader()


@pytest.fixture
def parsed_models(monkeypatch: pytest.MonkeyPatch, service_models: Loader) -> None:
    """Spare each test's client the 0.1 s of JSON that describes AWS."""
    monkeypatch.setattr(botocore.session, "create_loader", lambda data_path: service_models)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def make_store(
    clock: FakeClock, aws_environment: None, parsed_models: None
) -> Callable[..., S3Store]:
    def make(endpoint_url: str, *, multipart_from_bytes: int = 1000) -> S3Store:
        return S3Store(
            "bucket",
            "runs",
            endpoint_url=endpoint_url,
            policy=RetryPolicy(max_attempts=4),
            clock=clock,
            rng=random.Random(0),
            multipart_from_bytes=multipart_from_bytes,
        )

    return make


@pytest.fixture
def store(server: ScriptedS3, make_store: Callable[..., S3Store]) -> S3Store:
    return make_store(server.endpoint_url)


@pytest.fixture
def multipart_store(server: ScriptedS3, make_store: Callable[..., S3Store]) -> S3Store:
    """Sends four bytes and more in parts."""
    return make_store(server.endpoint_url, multipart_from_bytes=4)
