# SPDX-License-Identifier: Apache-2.0
"""`raydist ckpt import DIR --to RUN`: a DeepSpeed ZeRO checkpoint as the beginning of a run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from raydist.clock import SystemClock
from raydist.errors import ConfigError
from raydist.storage import open_store


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """Commit a DeepSpeed ZeRO-1, 2 or 3 checkpoint directory as the beginning of a new run.

    Weights, both moments and Adam's step, bit for bit; a start of the same name resumes from it at
    any world size, under any strategy. Its pickles are read without running what is in them.
    """

    directory: tyro.conf.Positional[Path]
    """What engine.save_checkpoint was given."""
    to: str
    """Directory or s3:// location of the run to make: <storage>/<name>."""
    tag: str | None = None
    """Which checkpoint; the one that its file `latest` names when left out."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        """Import; raises what the import does.

        Raises:
            ConfigError: There is no such directory.
        """
        from raydist.train.deepspeed_import import import_checkpoint  # torch

        if not self.directory.is_dir():
            raise ConfigError(problem=f"There is no directory {self.directory}.")
        name = self.to.rstrip("/").rpartition("/")[2]
        imported = import_checkpoint(
            self.directory, open_store(self.to), run=name, clock=SystemClock(), tag=self.tag
        )
        if self.json:
            print(json.dumps(asdict(imported), indent=1))
        else:
            print(
                f"{imported.tag}: ZeRO-{imported.stage} on {imported.world_size}, "
                f"{imported.tensors} tensors, {imported.bytes / 2**20:.1f} MiB, committed as step "
                f"{imported.step} of {self.to}"
            )
        return 0
