# SPDX-License-Identifier: Apache-2.0
"""`raydist ckpt export RUN --to DIR|s3://`: a run's weights as a Hugging Face directory."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import tyro

from raydist.checkpoint import layout
from raydist.checkpoint.huggingface_export import Exported, export_weights
from raydist.checkpoint.journal import Entry, Journal
from raydist.checkpoint.restore import read_commit
from raydist.config import DataConfig, ModelConfig
from raydist.config.huggingface import config_json
from raydist.errors import CheckpointError, ConfigError, ObjectMissingError
from raydist.plan.parameters import parameter_shapes
from raydist.storage import ObjectStore, open_store

_DTYPES = {"bf16": ("BF16", "bfloat16"), "fp16": ("F16", "float16"), "fp32": ("F32", "float32")}
_END_OF_BYTES = 256  # of the tokenizer `bytes`


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """Write a run's weights as sharded safetensors with index and config, for `from_pretrained`.

    Streams: no GPU, no cluster, memory of a few hundred MB whatever the model's size. Every block
    is verified as it is read.
    """

    location: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Directory or s3:// location of the run: <storage>/<name>."""
    to: str
    """Directory or s3:// prefix to write."""
    step: int | None = None
    """Step to export; the newest committed one when left out."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Format of the weights."""
    shard_gib: float = 5.0
    """Largest file."""
    tokenizer: str | None = None
    """Directory or s3:// prefix whose tokenizer files are copied along."""
    overwrite: bool = False
    """Replace an earlier export there."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        """Export; raises what the export does.

        Raises:
            ConfigError: There is no such run or step, or the numbers cannot be.
        """
        begun = time.monotonic()
        shard_bytes = int(self.shard_gib * 2**30)
        if shard_bytes < 1:
            raise ConfigError(
                problem=f"--shard-gib {self.shard_gib} holds nothing.", way_out="Use 5, say."
            )
        source = open_store(self.location)
        commit = _find_commit(source, self.location, self.step)
        manifest, _ = read_commit(source, commit)
        model, data = _read_config(source, self.location)
        dtype, torch_dtype = _DTYPES[self.dtype]
        exported = export_weights(
            source=source,
            manifest=manifest,
            target=open_store(self.to),
            shapes=parameter_shapes(model),
            dtype=dtype,
            shard_bytes=shard_bytes,
            document=config_json(
                model,
                max_positions=data.sequence_length,
                dtype=torch_dtype,
                eos_token_id=_END_OF_BYTES if data.tokenizer == "bytes" else None,
            ),
            tokenizer=open_store(self.tokenizer) if self.tokenizer else None,
            overwrite=self.overwrite,
        )
        self._say(exported, step=manifest.progress.step, seconds=time.monotonic() - begun)
        return 0

    def _say(self, exported: Exported, *, step: int, seconds: float) -> None:
        if self.json:
            what = {"step": step, "to": self.to, "dtype": self.dtype, "seconds": seconds}
            print(json.dumps(what | asdict(exported), indent=1))
            return
        print(
            f"step {step}: {exported.parameters:,} parameters as {self.dtype} in "
            f"{len(exported.files)} files, {exported.bytes / 2**20:.1f} MiB, {seconds:.1f} s"
        )


def _find_commit(store: ObjectStore, where: str, step: int | None) -> Entry:
    seen: list[str] = []
    journal = Journal(store)
    for commit in journal.commits(journal.tail()):
        if step is None or commit.facts["step"] == step:
            return commit
        seen.append(str(commit.facts["step"]))
    raise ConfigError(
        problem=f"There is no committed checkpoint{'' if step is None else f' of step {step}'} at "
        f"{where}.",
        way_out=f"There are: {', '.join(seen)}."
        if seen
        else "Name the run's own location: <storage>/<name>.",
    )


def _read_config(store: ObjectStore, where: str) -> tuple[ModelConfig, DataConfig]:
    try:
        config = json.loads(store.get(layout.RUN_KEY))["config"]
        return ModelConfig(**config["model"]), DataConfig(**config["data"])
    except ObjectMissingError as error:
        raise CheckpointError(
            problem=f"{where} has no {layout.RUN_KEY}, so the model's shape is not known.",
            way_out="Copy it from the run.",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            problem=f"{where}/{layout.RUN_KEY} cannot be read: {error!r}.",
            way_out="It may be of a newer raydist: upgrade.",
        ) from error
