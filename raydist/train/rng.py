# SPDX-License-Identifier: Apache-2.0
"""Random state of a rank: seeded, saved beside the tensors, and loaded where the world fits."""

from __future__ import annotations

import hashlib

import torch

from raydist.checkpoint.manifest import Manifest
from raydist.checkpoint.ranges import TensorSpec, WantedRange


def seed_everything(seed: int, rank: int, step: int = 0) -> None:
    """Seed torch's generators from (seed, rank, step)."""
    digest = hashlib.sha256(f"{seed}:{rank}:{step}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def held(*, rank: int, world_size: int) -> list[WantedRange]:
    """Return this rank's generator states, as ranges of tensors of its own."""
    return [
        WantedRange(
            spec=TensorSpec(key=_key(kind, rank, world_size), shape=(len(state),), dtype="U8"),
            offset=0,
            length=len(state),
        )
        for kind, state in _states().items()
    ]


def export(buffers: dict[str, memoryview], *, rank: int, world_size: int) -> None:
    """Copy this rank's generator states into their buffers."""
    for kind, state in _states().items():
        torch.frombuffer(buffers[_key(kind, rank, world_size)], dtype=torch.uint8).copy_(state)


def wanted(manifest: Manifest, *, rank: int, world_size: int) -> list[WantedRange]:
    """Return what to read of a checkpoint: this rank's states, if its world is the same."""
    keys = [_key(kind, rank, world_size) for kind in ("cpu", "cuda")]
    found = [manifest.tensors[key] for key in keys if key in manifest.tensors]
    return [WantedRange(spec=spec, offset=0, length=spec.numel) for spec in found]


def load(buffers: dict[str, memoryview], manifest: Manifest, *, rank: int, world_size: int) -> bool:
    """Set the generators from ``buffers``; False when the checkpoint is of another world."""
    key = _key("cpu", rank, world_size)
    if manifest.world_size != world_size or key not in buffers:
        return False
    torch.set_rng_state(torch.frombuffer(buffers[key], dtype=torch.uint8))
    key = _key("cuda", rank, world_size)
    if torch.cuda.is_available() and key in buffers:
        torch.cuda.set_rng_state(torch.frombuffer(buffers[key], dtype=torch.uint8))
    return True


def _states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _key(kind: str, rank: int, world_size: int) -> str:
    return f"rng/{kind}/rank-{rank:05d}-of-{world_size:05d}"
