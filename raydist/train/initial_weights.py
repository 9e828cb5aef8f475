# SPDX-License-Identifier: Apache-2.0
"""Initial weights out of a Hugging Face directory: each rank reads its own ranges, no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from raydist.checkpoint.group import Group
from raydist.checkpoint.huggingface_files import WeightFiles, read_weight_files
from raydist.checkpoint.huggingface_match import match_tensors
from raydist.checkpoint.huggingface_reads import RangeReads, plan_weight_reads, read_weights
from raydist.checkpoint.ranges import DTYPE_BYTES
from raydist.config import ModelConfig
from raydist.config.huggingface import differences
from raydist.errors import CheckpointError, ConfigError, RaydistError
from raydist.storage import ObjectStore, open_store
from raydist.train.engine import Engine

_KINDS = ("master/", "buffer/")


def load_initial_weights(
    engine: Engine, model: ModelConfig, *, where: str, group: Group
) -> tuple[str, ...]:
    """Set the engine's weights from the directory or s3:// prefix ``where``. All ranks.

    Rank 0 reads index and headers and shares them. A rank holds its share, which it had before,
    and a bounded window of what is on its way.

    Returns:
        What was done, in lines for people.

    Raises:
        ConfigError: They are no weights of this model.
        CheckpointError: On any rank a file was missing, truncated or not finite; named on all.
    """
    store = open_store(where)
    files = _share_files(group, store, model, where)
    wanted = engine.wanted()
    specs = [item.spec for item in wanted if item.spec.key.startswith(_KINDS)]
    match = match_tensors(files, specs)
    planned = plan_weight_reads(match.sources, wanted)
    arriving = _Arriving(store, planned)
    try:
        engine.load(arriving, {"adam_step": 0.0})
    finally:
        arriving.close()
    failures = group.broadcast(group.gather(arriving.failure))
    failed = [f"rank {rank}: {why}" for rank, why in enumerate(failures) if why]
    if failed:
        raise CheckpointError(
            problem=f"The weights at {files.where} cannot be read. {failed[0]}",
            way_out="Copy them anew, to s3:// or to a directory that every node mounts.",
        )
    read = sum(p.length * DTYPE_BYTES[p.source.dtype] for p in planned)
    total = sum(group.broadcast(group.gather(read)))
    first = f"weights from {files.where}: {len(match.sources)} tensors, {total / 2**20:.1f} MiB"
    return first, *match.notes


def _share_files(group: Group, store: ObjectStore, model: ModelConfig, where: str) -> WeightFiles:
    box: dict[str, WeightFiles | RaydistError] = {}
    if group.rank == 0:
        try:
            files = read_weight_files(store, where=where)
            _check_function(model, files)
            box = {"files": files}
        except RaydistError as error:
            box = {"error": error}
    found = next(iter(group.broadcast(box).values()))
    if isinstance(found, RaydistError):
        raise found
    return found


def _check_function(model: ModelConfig, files: WeightFiles) -> None:
    """Refuse weights whose config.json describes another function of the same shapes.

    Raises:
        ConfigError: With every difference.
    """
    found = differences(model, files.document)
    if found:
        lines = "".join(f"\n    {line}" for line in found)
        raise ConfigError(
            problem=f"The model of {files.where} is not the one configured:{lines}",
            way_out="Set these of the model section as they are there.",
        )


class _Arriving(Mapping[str, memoryview]):
    """Buffers for ``Engine.load`` that are read when they are asked for, in plan order.

    Tensors without a source are empty, which leaves the engine's own values. A failure does the
    same for all that follow, so that the rank goes on to the collectives its peers are in, and
    is told afterwards.
    """

    def __init__(self, store: ObjectStore, planned: Sequence[RangeReads]) -> None:
        self.failure = ""
        self._keys = [item.key for item in planned]
        self._due = frozenset(self._keys)
        self._reads = read_weights(store, planned)

    def __getitem__(self, key: str) -> memoryview:
        if key not in self._due or self.failure:
            return memoryview(b"")
        try:
            found, data = next(self._reads)
        except (RaydistError, MemoryError) as error:
            self.failure = str(error) or repr(error)
            return memoryview(b"")
        if found != key:
            raise RuntimeError(f"the engine asks for {key}, but wants {found} before it")
        return data

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def close(self) -> None:
        """Stop reading ahead."""
        self._reads.close()
