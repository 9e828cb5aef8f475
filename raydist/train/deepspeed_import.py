# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed ZeRO checkpoint as the first commit of a new run, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raydist.checkpoint import layout
from raydist.checkpoint.attempt import Attempt, open_attempt
from raydist.checkpoint.deepspeed_layout import Piece, stage3_pieces, stage12_pieces
from raydist.checkpoint.journal import Journal
from raydist.checkpoint.manifest import Manifest, Progress, checksum
from raydist.checkpoint.objects import DataObject, StoredRange, describe, encode
from raydist.checkpoint.ranges import LocalRange, TensorSpec
from raydist.clock import Clock
from raydist.errors import CheckpointCorruptError, CheckpointError, ConfigError
from raydist.storage import ObjectStore
from raydist.train.deepspeed_files import DeepSpeedFiles, find_files, load_file
from raydist.train.tensors import spec_of
from raydist.train.versions import versions

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """What an import committed."""

    tag: str
    step: int
    stage: int
    world_size: int
    tensors: int
    bytes: int
    manifest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flat:
    """One rank's optimizer state.

    Fields:
        tensors: Flat fp32 tensors by kind: as many of each kind as there are masters.
        adam_step: Updates taken.
    """

    stage: int
    tensors: dict[str, list[torch.Tensor]]
    paddings: Sequence[Sequence[int]] | None
    adam_step: float


def import_checkpoint(
    directory: Path, store: ObjectStore, *, run: str, clock: Clock, tag: str | None = None
) -> Imported:
    """Commit the fp32 masters, both moments and Adam's step of a ZeRO-1, 2 or 3 checkpoint.

    One rank's file is held at a time. The corpus is not known, so the resume accepts any.

    Args:
        directory: What ``save_checkpoint`` was given.
        store: Rooted at the run to make.
        run: Its name.
        clock: For the journal.
        tag: Which checkpoint; None takes the one that `latest` names.

    Raises:
        ConfigError: It is no such checkpoint, or the run exists.
        CheckpointCorruptError: A file is missing or cannot be read.
        CheckpointError: The files do not add up to whole tensors.
    """
    files = find_files(directory, tag)
    if Journal(store).tail() is not None:
        raise ConfigError(
            problem=f"There is a run {run} already.", way_out="Import to another --to."
        )
    model = load_file(files.model)
    groups = _parameter_shapes(files, model)
    pieces, stage, adam_step = _plan(files, groups)
    attempt = open_attempt(run=run, store=store, driver=f"import-{run}", clock=clock)
    try:
        manifest = _write(
            files, model, pieces, store, attempt, run=run, stage=stage, adam_step=adam_step
        )
        raw = manifest.encode()
        key = layout.manifest_key(manifest.progress.step, attempt.number)
        store.put(key, raw)
        attempt.commit(
            step=manifest.progress.step,
            manifest_key=key,
            manifest_bytes=len(raw),
            crc32c=checksum(raw),
        )
        attempt.close("imported")
    finally:
        attempt.release()
    return Imported(
        tag=files.tag,
        step=manifest.progress.step,
        stage=stage,
        world_size=files.world_size,
        tensors=len(manifest.tensors),
        bytes=manifest.total_bytes,
        manifest=key,
    )


def _parameter_shapes(files: DeepSpeedFiles, model: dict[str, Any]) -> list[dict[str, list[int]]]:
    """Return {name: shape} for each optimizer group.

    Raises:
        ConfigError: Parameters are frozen, or it was no ZeRO run.
    """
    if model.get("frozen_param_shapes"):
        raise ConfigError(
            problem=f"{files.model} has {len(model['frozen_param_shapes'])} frozen parameters, "
            "which this version does not import.",
            way_out="Save it from a run that trains all of them.",
        )
    groups = model.get("param_shapes")
    if not groups:
        raise ConfigError(
            problem=f"{files.model} has no param_shapes.",
            way_out="Only checkpoints of ZeRO 1 to 3 are imported.",
        )
    return [{name: list(shape) for name, shape in group.items()} for group in groups]


def _plan(
    files: DeepSpeedFiles, groups: list[dict[str, list[int]]]
) -> tuple[list[Piece], int, float]:
    """Return every piece of every rank, the stage, and Adam's step; sizes alone are looked at.

    Raises:
        CheckpointError: The ranks' files are not of one save.
    """
    found = [_flat(path) for path in files.optimizer]
    numels = [[t.numel() for t in flat.tensors["master"]] for flat in found]
    stage, steps = found[0].stage, {flat.adam_step for flat in found}
    if len({flat.stage for flat in found}) > 1 or len(steps) > 1:
        raise CheckpointError(
            problem=f"The ranks' files are of different saves: Adam's steps {sorted(steps)}."
        )
    if stage == 3:
        pieces = [
            piece
            for rank, sizes in enumerate(numels)
            for piece in stage3_pieces(groups, sizes, rank=rank, world_size=files.world_size)
        ]
    else:
        pieces = stage12_pieces(groups, found[0].paddings, numels)
    return pieces, stage, steps.pop()


def _flat(path: Path) -> _Flat:
    """Read one rank's flat tensors, without what pads them at the end.

    Raises:
        ConfigError: It is of another optimizer than Adam, or of an elastic checkpoint.
        CheckpointCorruptError: Something of it is missing.
    """
    file = load_file(path)
    try:
        state = file["optimizer_state_dict"]
        stage = _stage(state["zero_stage"])
        masters = state["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]
        inner = state["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
        if not isinstance(inner, Mapping) or "state" not in inner:
            raise ConfigError(
                problem=f"{path} has its optimizer state in the form of an elastic checkpoint.",
                way_out="Save again with zero_optimization.elastic_checkpoint false.",
            )
        return _of_adam(path, stage, masters, inner, state.get("param_alignment_paddings"))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointCorruptError(key=str(path), reason=f"no ZeRO state: {error!r}") from error


def _stage(value: Any) -> int:
    # The pickle holds ZeroStageEnum(value), of which the stand-in kept the value.
    (stage,) = getattr(value, "values", (value,))
    return int(stage)


def _of_adam(
    path: Path,
    stage: int,
    masters: Sequence[torch.Tensor],
    inner: Mapping[str, Any],
    paddings: Sequence[Sequence[int]] | None,
) -> _Flat:
    tensors: dict[str, list[torch.Tensor]] = {"master": list(masters)}
    steps: set[float] = set()
    for kind in _MOMENTS:
        tensors[kind] = []
        for number, master in enumerate(masters):
            # A rank whose part of a group is empty may have no state for it.
            own = inner["state"].get(number, {})
            if kind not in own and master.numel():
                raise ConfigError(
                    problem=f"{path} has {sorted(own)} for group {number}, and no {kind}.",
                    way_out="Only Adam and AdamW are imported, after their first step.",
                )
            if kind in own:
                tensors[kind].append(own[kind][: master.numel()])
            else:
                tensors[kind].append(torch.zeros(0))
            step = own.get("step", inner["param_groups"][number].get("step"))
            if step is not None:
                steps.add(float(step))
    if len(steps) != 1 or any(t.dtype != torch.float32 for ts in tensors.values() for t in ts):
        raise CheckpointCorruptError(
            key=str(path), reason=f"its state is not fp32 Adam's of one step ({sorted(steps)})"
        )
    return _Flat(stage=stage, tensors=tensors, paddings=paddings, adam_step=steps.pop())


def _write(
    files: DeepSpeedFiles,
    model: dict[str, Any],
    pieces: Iterable[Piece],
    store: ObjectStore,
    attempt: Attempt,
    *,
    run: str,
    stage: int,
    adam_step: float,
) -> Manifest:
    """Write one object for each rank's file, and return the manifest over them, checked."""
    step = int(model["global_steps"])
    specs: dict[str, TensorSpec] = {}
    ranges: dict[str, list[tuple[int, StoredRange]]] = {}
    objects: list[DataObject] = []
    by_rank: dict[int, list[Piece]] = {rank: [] for rank in range(files.world_size)}
    for piece in pieces:
        by_rank[piece.rank].append(piece)
    for rank, path in enumerate(files.optimizer):
        local = _local_ranges(_flat(path), by_rank[rank])
        local += _buffers(model) if rank == 0 else []
        data, stored = encode(local)
        key = layout.part_key(step, attempt.number, rank, files.world_size)
        store.put(key, memoryview(data))
        objects.append(describe(key, data))
        for item in local:
            specs[item.spec.key] = item.spec
            ranges.setdefault(item.spec.key, []).append((rank, stored[item.spec.key]))
    manifest = Manifest(
        run=run,
        attempt=attempt.number,
        world_size=files.world_size,
        strategy=f"deepspeed-zero{stage}",
        precision="",
        config_hash="",
        corpus="",
        created_unix_s=time.time(),
        versions=versions() | {"imported_deepspeed": str(model.get("ds_version"))},
        progress=Progress(
            step=step,
            data_position=int(model["global_samples"]),
            epoch=0,
            tokens=0,
            skipped_steps=int(model["skipped_steps"]),
        ),
        scalars={"adam_step": adam_step},
        tensors=specs,
        objects=tuple(objects),
        ranges={key: tuple(found) for key, found in ranges.items()},
    )
    manifest.check()
    return manifest


def _local_ranges(flat: _Flat, pieces: Iterable[Piece]) -> list[LocalRange]:
    ranges: list[LocalRange] = []
    for piece in pieces:
        for kind, tensors in flat.tensors.items():
            part = tensors[piece.flat][piece.start : piece.start + piece.length]
            key = f"{kind}/{piece.name}"
            if not torch.isfinite(part).all():
                raise CheckpointError(
                    problem=f"{key} is not finite in elements [{piece.offset}, "
                    f"{piece.offset + piece.length}).",
                    way_out="Import an earlier checkpoint of that run with --tag.",
                )
            ranges.append(
                LocalRange(
                    spec=spec_of(key, piece.shape, torch.float32),
                    offset=piece.offset,
                    length=piece.length,
                    data=_bytes(part),
                )
            )
    return ranges


def _bytes(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.contiguous().view(torch.uint8).numpy()
    return memoryview(array)


def _buffers(model: dict[str, Any]) -> list[LocalRange]:
    """Return the model's persistent buffers, whole."""
    found = []
    for name in model.get("buffer_names") or ():
        tensor = model["module"][name]
        found.append(
            LocalRange(
                spec=spec_of(f"buffer/{name}", tensor.shape, tensor.dtype),
                offset=0,
                length=tensor.numel(),
                data=_bytes(tensor.reshape(-1)),
            )
        )
    return found
