# SPDX-License-Identifier: Apache-2.0
"""`raydist ckpt show | diff RUN`: what a checkpoint holds, and how two of them differ."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import tyro

from raydist.checkpoint.compare import (
    Distance,
    Summary,
    diff_manifests,
    measure_distances,
    summarize,
)
from raydist.checkpoint.inspect import read_manifest, survey
from raydist.checkpoint.manifest import Manifest
from raydist.errors import ConfigError
from raydist.storage import ObjectStore, open_store


@dataclass(frozen=True, kw_only=True, slots=True)
class Show:
    """Say what one checkpoint holds: tensors, bytes by kind and rank, progress, versions."""

    location: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Directory or s3:// location of the run: <storage>/<name>."""
    step: int | None = None
    """Its step; the newest when left out."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        """Print it.

        Raises:
            ConfigError: There is no such checkpoint.
            CheckpointError: Its manifest cannot be read.
        """
        summary = summarize(_find(open_store(self.location), self.step))
        print(json.dumps(asdict(summary), indent=1) if self.json else _text(summary))
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Diff:
    """Say in what two checkpoints of a run differ."""

    location: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Directory or s3:// location of the run: <storage>/<name>."""
    step_a: tyro.conf.Positional[int]
    """Step of the one."""
    step_b: tyro.conf.Positional[int]
    """Step of the other."""
    deep: bool = False
    """Read both and compare the values of every tensor."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        """Print it; status 0 whether or not they differ.

        Raises:
            ConfigError: There is no such checkpoint.
            CheckpointError: A manifest cannot be read, or with --deep an object.
        """
        store = open_store(self.location)
        a, b = _find(store, self.step_a), _find(store, self.step_b)
        facts = diff_manifests(a, b)
        distances = measure_distances(store, a, b) if self.deep else None
        if self.json:
            report: dict[str, Any] = {"differs": facts}
            if distances is not None:
                report["values"] = [_json_distance(distance) for distance in distances]
            print(json.dumps(report, indent=1))
            return 0
        for key, (left, right) in facts.items():
            print(f"{key}: {_or_none(left)} -> {_or_none(right)}")
        if not facts:
            print("no difference but in values" if distances is None else "the same but for values")
        for distance in distances or ():
            print(
                f"{distance.key}: max |a-b| {distance.max_abs:.6g}, "
                f"{distance.num_different} of {distance.numel} elements differ"
            )
        return 0


def _find(store: ObjectStore, step: int | None) -> Manifest:
    """Return the newest checkpoint of ``step``, or of all.

    Raises:
        ConfigError: There is none.
        CheckpointError: Its manifest cannot be read.
    """
    found = survey(store).checkpoints
    for info in found:
        if step is None or info.step == step:
            return read_manifest(store, info.manifest)
    of_step = "" if step is None else f" of step {step}"
    raise ConfigError(
        problem=f"There is no committed checkpoint{of_step}.",
        way_out=f"There are: {', '.join(str(info.step) for info in found) or 'none'}.",
    )


def _json_distance(distance: Distance) -> dict[str, Any]:
    """JSON has no infinity: a difference that is none stands as null."""
    tree = asdict(distance)
    if distance.max_abs == float("inf"):
        tree["max_abs"] = None
    return tree


def _or_none(value: Any) -> str:
    return "not there" if value is None else str(value)


def _text(summary: Summary) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary.created_unix_s))
    lines = [
        f"run {summary.run}, attempt {summary.attempt}, written {when}",
        f"{summary.strategy} on {summary.world_size}, {summary.precision}; config "
        f"{summary.config_hash}, corpus {summary.corpus}",
        ", ".join(f"{key} {value}" for key, value in summary.progress.items()),
        ", ".join(f"{key} {value:g}" for key, value in summary.scalars.items()) or "no scalars",
        ", ".join(f"{key} {value}" for key, value in summary.versions.items()),
        f"{'kind':<12}{'tensors':>8}{'MiB':>12}",
    ]
    for kind, count in sorted(summary.tensors_by_kind.items()):
        lines.append(f"{kind:<12}{count:>8}{summary.bytes_by_kind[kind] / 2**20:>12.2f}")
    sizes = summary.rank_bytes
    lines.append(
        f"{len(sizes)} objects, {summary.total_bytes / 2**20:.2f} MiB; a rank's "
        f"{min(sizes, default=0) / 2**20:.2f} to {max(sizes, default=0) / 2**20:.2f} MiB"
    )
    return "\n".join(lines)
