# SPDX-License-Identifier: Apache-2.0
"""Clients of an object store against each other: uploads from memory, ranged reads, restores.

    python tests/bench/object_store.py [sink] [upload] [download] [restore] [checks] [scale]
                                       [--mib 512] [--repeats 5]

sink:     upload into a server that keeps nothing (raydist.testing.null_s3): the client alone.
upload:   upload into SeaweedFS, on the same cores.
download: the same object back in parallel ranges; sink: out of the null server.
restore:  a checkpoint of two ranks at 2 and 3 ranks, verified, against Ray's way (pyarrow
          copy_files of the directory) and boto3's download.
checks:   CRC32C of a checkpoint's blocks.
scale:    manifest and plan of Llama-3-70B on up to 1,024 ranks.

Interleaved, in turning order; medians, with the least and the most. obstore and s5cmd join where
they are installed. Set TMPDIR to a tmpfs, so that no disk is measured.
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import botocore.session
import numpy as np
import pyarrow.fs
from boto3.session import Session
from botocore.config import Config
from s3transfer.crt import (
    BotocoreCRTCredentialsWrapper,
    BotocoreCRTRequestSerializer,
    CRTTransferManager,
    create_s3_crt_client,
)

from raydist.checkpoint.manifest import Manifest, Progress, decode
from raydist.checkpoint.objects import crc32c, describe, encode
from raydist.checkpoint.ranges import LocalRange, TensorSpec, WantedRange, partition
from raydist.checkpoint.reads import plan_reads, read_spans
from raydist.storage.s3 import S3Store
from raydist.testing.null_s3 import BUCKET, NullS3
from raydist.testing.s3_server import S3Server

sys.path.insert(0, str(Path(__file__).parents[1] / "unit/checkpoint"))

MIB = 1 << 20
PART = 16 * MIB
THREADS = 4


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where to: an endpoint and a bucket."""

    url: str
    bucket: str

    def boto3(self, **s3: Any) -> Any:
        config = Config(
            s3={"addressing_style": "path", **s3},
            max_pool_connections=20,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        return Session().client("s3", endpoint_url=self.url, config=config)

    def crt(self) -> CRTTransferManager:
        """As boto3's own CRT mode makes it, but for TLS, which it takes for granted."""
        session = botocore.session.get_session()
        config = Config(s3={"addressing_style": "path"})
        wrapped = BotocoreCRTCredentialsWrapper(session.get_credentials())
        return CRTTransferManager(
            create_s3_crt_client(
                "us-east-1",
                crt_credentials_provider=wrapped.to_crt_credentials_provider(),
                part_size=PART,
                use_ssl=False,
            ),
            BotocoreCRTRequestSerializer(
                session, client_kwargs={"endpoint_url": self.url, "config": config}
            ),
        )

    def arrow(self) -> pyarrow.fs.S3FileSystem:
        return pyarrow.fs.S3FileSystem(
            endpoint_override=self.url.removeprefix("http://"),
            scheme="http",
            access_key=os.environ["AWS_ACCESS_KEY_ID"],
            secret_key=os.environ["AWS_SECRET_ACCESS_KEY"],
            region="us-east-1",
        )

    def obstore(self) -> Any:
        from obstore.store import S3Store as Store

        return Store(
            self.bucket,
            endpoint=self.url,
            region="us-east-1",
            unsigned_payload=True,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )


Side = Callable[[], None]


def measure(title: str, sides: dict[str, Side], num_bytes: int, repeats: int) -> None:
    """Run every side ``repeats`` times, forth and back, and print medians."""
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side()  # connections, imports
    for turn in range(repeats):
        for name in list(sides) if turn % 2 == 0 else list(sides)[::-1]:
            before_s, begun = cpu_s(), time.perf_counter()
            sides[name]()
            speeds[name].append(num_bytes / MIB / (time.perf_counter() - begun))
            cpu[name].append((cpu_s() - before_s) / (num_bytes / 2**30))
    print(f"\n{title}: {num_bytes / MIB:.0f} MiB, {repeats} repeats, load {os.getloadavg()[0]:.1f}")
    for name, found in speeds.items():
        print(
            f"  {name:28} {statistics.median(found):6.0f} MiB/s ({min(found):.0f} to "
            f"{max(found):.0f}), {statistics.median(cpu[name]):5.2f} CPU-s/GiB",
            flush=True,
        )


def cpu_s() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def uploads(target: Target, data: bytearray, folder: Path) -> dict[str, Side]:
    """Every client's best documented way from memory; s5cmd and CRT from a file in memory."""
    file = folder / "upload.bin"
    file.write_bytes(data)
    store = S3Store(target.bucket, "bench", endpoint_url=target.url)
    client, arrow = target.boto3(), target.arrow()
    crt = target.crt()

    def with_arrow() -> None:
        with arrow.open_output_stream(f"{target.bucket}/bench/arrow") as stream:
            stream.write(data)

    sides: dict[str, Side] = {
        "raydist S3Store.put": lambda: store.put("raydist", memoryview(data)),
        "boto3 upload_fileobj": lambda: client.upload_fileobj(
            io.BytesIO(data), target.bucket, "bench/boto3"
        ),
        "s3transfer CRT upload": lambda: crt.upload(str(file), target.bucket, "bench/crt").result(),
        "pyarrow open_output_stream": with_arrow,
    }
    if has_obstore():
        import obstore

        place = target.obstore()
        sides["obstore put, unsigned"] = lambda: obstore.put(
            place, "bench/obstore", memoryview(data), chunk_size=PART, max_concurrency=THREADS
        )
    if shutil.which("s5cmd"):
        command = ["s5cmd", "--endpoint-url", target.url, "cp", str(file)]
        sides["s5cmd cp"] = lambda: quiet([*command, f"s3://{target.bucket}/bench/s5cmd"])
    return sides


def downloads(target: Target, key: str, num_bytes: int) -> dict[str, Side]:
    """Ranged, four at a time, into memory that is there already."""
    into = memoryview(bytearray(num_bytes))
    into[::4096] = bytes(len(into[::4096]))
    store = S3Store(target.bucket, endpoint_url=target.url)
    client = target.boto3()
    starts = range(0, num_bytes, PART)
    pool = ThreadPoolExecutor(THREADS)

    def ours() -> None:
        counts = pool.map(lambda at: store.get(key, start=at, into=into[at : at + PART]), starts)
        assert sum(counts) == num_bytes

    def plain(at: int) -> int:
        wanted = f"bytes={at}-{min(at + PART, num_bytes) - 1}"
        body = client.get_object(Bucket=target.bucket, Key=key, Range=wanted)["Body"].read()
        into[at : at + len(body)] = body
        return len(body)

    def ranged() -> None:
        assert sum(pool.map(plain, starts)) == num_bytes

    sides: dict[str, Side] = {"raydist get(into)": ours, "boto3 get_object threads": ranged}
    if has_obstore():
        import obstore

        place = target.obstore()

        def piece(at: int) -> int:
            end = min(at + PART, num_bytes)
            found = obstore.get_range(place, key, start=at, end=end)
            into[at:end] = memoryview(found)
            return end - at

        def rust() -> None:
            assert sum(pool.map(piece, starts)) == num_bytes

        sides["obstore get_range threads"] = rust
    return sides


def restores(target: Target, num_bytes: int, folder: Path) -> dict[str, Side]:
    """A ZeRO-like checkpoint by two ranks; whole restores of all ranks' states."""
    numel = num_bytes // 4 // 24
    specs = [TensorSpec(key=f"master/t{n}", shape=(numel,), dtype="F32") for n in range(24)]
    store = S3Store(target.bucket, "restore", endpoint_url=target.url)
    manifest = saved(store, specs, 2)
    client, arrow = target.boto3(), target.arrow()
    state_bytes = sum(4 * spec.numel for spec in specs)

    read_of: dict[int, float] = {}

    def ours(world_size: int) -> Side:
        wants = [
            [
                WantedRange(spec=spec, offset=offset, length=length)
                for spec in specs
                for offset, length in [partition(spec.numel, world_size=world_size, rank=rank)]
            ]
            for rank in range(world_size)
        ]

        def run() -> None:
            num_read = 0
            for wanted in wants:  # as memory that restore() makes anew
                buffers = {w.spec.key: memoryview(bytearray(4 * w.length)) for w in wanted}
                spans = plan_reads(manifest, wanted)
                num_read += read_spans(store, manifest, spans, buffers)
            read_of[world_size] = num_read / state_bytes

        return run

    local = folder / "ray"
    local.mkdir()

    def ray() -> None:
        pyarrow.fs.copy_files(
            f"{target.bucket}/restore",
            str(local),
            source_filesystem=arrow,
            destination_filesystem=pyarrow.fs.LocalFileSystem(),
            chunk_size=64 * MIB,
        )

    def boto3_files() -> None:
        for rank in range(2):
            client.download_file(target.bucket, f"restore/rank-{rank}", str(folder / f"b{rank}"))

    for world_size in (2, 3):
        ours(world_size)()
        print(f"restore at {world_size} ranks reads {read_of[world_size]:.4f} of the state")
    return {
        "raydist, 2 ranks -> 2": ours(2),
        "raydist, 2 ranks -> 3": ours(3),
        "pyarrow copy_files (Ray)": ray,
        "boto3 download_file": boto3_files,
    }


def saved(store: S3Store, specs: list[TensorSpec], world_size: int) -> Manifest:
    """Put a checkpoint of random state and return its manifest."""
    ranges: dict[str, list[Any]] = {spec.key: [] for spec in specs}
    objects = []
    for rank in range(world_size):
        items = []
        for spec in specs:
            offset, length = partition(spec.numel, world_size=world_size, rank=rank)
            data = np.random.default_rng(rank).integers(0, 256, 4 * length, dtype=np.uint8)
            items.append(LocalRange(spec=spec, offset=offset, length=length, data=data.data))
        raw, stored = encode(items)
        store.put(f"rank-{rank}", memoryview(raw))
        objects.append(describe(f"rank-{rank}", raw))
        for key, one in stored.items():
            ranges[key].append((rank, one))
    return Manifest(
        run="bench",
        attempt=1,
        world_size=world_size,
        strategy="zero3",
        precision="fp32",
        config_hash="",
        corpus="",
        created_unix_s=0.0,
        versions={},
        progress=Progress(step=1, data_position=0, epoch=0, tokens=0, skipped_steps=0),
        scalars={},
        tensors={spec.key: spec for spec in specs},
        objects=tuple(objects),
        ranges={key: tuple(found) for key, found in ranges.items()},
    )


def checks(data: bytearray, repeats: int) -> None:
    """What verifying costs, by size of block."""
    view = memoryview(data)

    def blocks_of(size: int) -> Side:
        return lambda: [crc32c(view[at : at + size]) for at in range(0, len(view), size)] and None

    sides = {f"CRC32C of {size // 1024} KiB": blocks_of(size) for size in (1 << 16, 1 << 20)}
    measure("checks", sides, len(data), repeats)


def scale() -> None:
    """Print seconds and megabytes of a commit and a restore's plan, by world size."""
    from test_checkpoint_costs import zero3_manifest

    for world_size in (64, 256, 1024):
        manifest = zero3_manifest(world_size, num_layers=80)
        marks = [time.perf_counter()]
        manifest.check()
        raw = manifest.encode()
        marks.append(time.perf_counter())
        read = decode(raw, where="bench")
        marks.append(time.perf_counter())
        wanted = [
            WantedRange(spec=spec, offset=offset, length=length)
            for spec in read.tensors.values()
            for offset, length in [partition(spec.numel, world_size=world_size * 3 // 4, rank=5)]
        ]
        plan_reads(read, wanted)
        marks.append(time.perf_counter())
        check_s, decode_s, plan_s = (b - a for a, b in pairwise(marks))
        print(
            f"scale: {world_size} ranks, {len(raw) / 1e6:.1f} MB, check and encode "
            f"{check_s:.2f} s, decode {decode_s:.2f} s, plan of one rank {plan_s:.2f} s",
            flush=True,
        )


def has_obstore() -> bool:
    try:
        import obstore  # noqa: F401
    except ImportError:
        return False
    return True


def quiet(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=[])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    parts = options.parts or ["sink", "upload", "download", "restore", "checks", "scale"]
    num_bytes, repeats = options.mib * MIB, options.repeats
    block = np.random.default_rng(0).integers(0, 256, 64 * MIB, dtype=np.uint8).tobytes()
    data = bytearray(block * -(-num_bytes // len(block)))[:num_bytes]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "sink" in parts:
            with NullS3() as sink:
                os.environ.update(sink.environment())
                target = Target(url=sink.endpoint_url, bucket=BUCKET)
                sides = uploads(target, data, folder)
                for side_name, side in sides.items():
                    before = sink.bytes_received()
                    side()
                    missing = num_bytes - (sink.bytes_received() - before)
                    assert missing <= 0, f"{side_name} left out {missing} bytes"
                measure("upload into the null sink", sides, num_bytes, repeats)
                found = downloads(target, "any", num_bytes)
                measure("download out of the null server", found, num_bytes, repeats)
        if {"upload", "download", "restore"} & set(parts):
            with S3Server() as server:
                os.environ.update(server.environment())
                target = Target(url=server.endpoint_url, bucket=server.bucket)
                if "upload" in parts:
                    sides = uploads(target, data, folder)
                    measure("upload into SeaweedFS", sides, num_bytes, repeats)
                if "download" in parts:
                    S3Store(server.bucket, endpoint_url=target.url).put("down", memoryview(data))
                    found = downloads(target, "down", num_bytes)
                    measure("download from SeaweedFS", found, num_bytes, repeats)
                if "restore" in parts:
                    measure("restore", restores(target, num_bytes, folder), num_bytes, repeats)
    if "checks" in parts:
        checks(data, repeats)
    if "scale" in parts:
        scale()


if __name__ == "__main__":
    main()
