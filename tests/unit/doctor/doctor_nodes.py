# SPDX-License-Identifier: Apache-2.0
"""Healthy nodes as plain facts, to be changed in one place each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from raydist.doctor import Finding, NodeFacts, examine
from raydist.doctor.facts import (
    ClockOffset,
    FolderFacts,
    GpuFacts,
    GpuPair,
    LimitFacts,
    MemoryFacts,
    OpFacts,
    StorageFacts,
)

MIB, GIB = 1 << 20, 1 << 30

VERSIONS = {
    "python": "3.11.7",
    "raydist": "0.1.0",
    "torch": "2.13.0+cu128",
    "cuda": "12.8",
    "nccl": "2.28.3",
    "ray": "2.60.0",
    "deepspeed": "0.19.8",
    "transformers": "5.24.0",
    "numpy": "2.4.6",
    "driver": "570.86.15",
    "kernel": "6.8.0",
    "libc": "glibc 2.35",
    "machine": "x86_64",
}


def gpu(index: int = 0, **changes: Any) -> GpuFacts:
    """An idle H100."""
    healthy = GpuFacts(
        index=index,
        uuid=f"GPU-{index}",
        name="NVIDIA H100 80GB HBM3",
        memory_total_bytes=80 * GIB,
        memory_used_bytes=1 * GIB,
        compute_mode="Default",
        num_uncorrected_errors=0,
    )
    return replace(healthy, **changes)


def node(name: str = "node-1", **changes: Any) -> NodeFacts:
    """A node with two GPUs."""
    healthy = NodeFacts(
        node=name,
        node_id=f"id-of-{name}",
        address="10.0.0.1",
        versions=VERSIONS,
        memory=MemoryFacts(
            total_bytes=512 * GIB,
            available_bytes=480 * GIB,
            shm_total_bytes=256 * GIB,
            shm_free_bytes=256 * GIB,
        ),
        limits=LimitFacts(
            open_files_soft=1024,
            open_files_hard=1 << 20,
            locked_memory_bytes=None,
            processes=100_000,
        ),
        num_cpus=64.0,
        load_1min=1.0,
        gpus=(gpu(0), gpu(1)),
        gpu_pairs=(GpuPair(first=0, second=1, peer_access="OK", link="NV18"),),
        folders=(
            FolderFacts(
                purpose="ray", path="/tmp/ray", total_bytes=900 * GIB, free_bytes=800 * GIB
            ),
        ),
        ops=OpFacts(folder="/venv/torch_extensions", built=("deepspeed_shm_comm",)),
        clock=ClockOffset(offset_s=0.002, round_trip_s=0.001),
        storage=StorageFacts(
            url="s3://bucket/runs",
            upload_bytes_per_s=90e6,
            download_bytes_per_s=400e6,
            latency_s=0.01,
        ),
    )
    return replace(healthy, **changes)


def cpu_node(name: str = "head", **changes: Any) -> NodeFacts:
    """A node without GPUs, with torch for CPUs."""
    versions = {k: v for k, v in VERSIONS.items() if k not in ("cuda", "nccl", "driver")}
    bare = node(name, gpus=(), gpu_pairs=(), versions=versions | {"torch": "2.13.0+cpu"})
    return replace(bare, **changes)


def versions(**changes: str) -> dict[str, str]:
    """The healthy versions, some of them others."""
    return VERSIONS | changes


def healthy(count: int = 3) -> list[NodeFacts]:
    """Nodes that are all alike."""
    return [node(f"node-{number}") for number in range(1, count + 1)]


def told(nodes: list[NodeFacts], check: str, **more: Any) -> list[Finding]:
    """The findings of one check; all others must be none."""
    findings = examine(nodes, **more)
    others = [f for f in findings if f.check != check]
    assert others == [], others
    return findings


def one(nodes: list[NodeFacts], check: str, **more: Any) -> Finding:
    """The only finding."""
    findings = told(nodes, check, **more)
    assert len(findings) == 1, findings
    assert findings[0].why
    assert findings[0].what_to_do
    return findings[0]
