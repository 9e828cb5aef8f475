# SPDX-License-Identifier: Apache-2.0
"""`raydist ckpt COMMAND`: a run's checkpoints, listed, checked, compared, saved, ended, moved."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Protocol

import tyro

from raydist.checkpoint.inspect import (
    CheckpointInfo,
    Survey,
    has_uncommitted_objects,
    survey,
    verify_checkpoint,
    was_pruned,
)
from raydist.cli.ckpt_contents import Diff, Show
from raydist.cli.ckpt_export import Export
from raydist.cli.ckpt_import import Import
from raydist.cli.ckpt_prune import Prune
from raydist.cli.ckpt_save import Save
from raydist.errors import CheckpointError, ConfigError, FailureKind
from raydist.storage import ObjectStore, open_store


class Command(Protocol):
    """One `raydist ckpt` command with its arguments."""

    def run(self) -> int:
        """Do it and return the exit status."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Ls:
    """List the committed checkpoints of a run, newest first."""

    location: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Directory or s3:// location of the run: <storage>/<name>."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        """Print them."""
        found = _survey(open_store(self.location), self.location)
        if self.json:
            print(json.dumps([asdict(info) for info in found.checkpoints], indent=1))
            return 0
        if not found.checkpoints:
            print("objects, but no committed checkpoint")
        for info in found.checkpoints:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.unix_s))
            what = info.problem or (
                f"{info.strategy} on {info.world_size}, {info.bytes / 2**20:.1f} MiB"
            )
            if info.known_by == "manifest":
                what += "  (by its manifest; no readable journal entry names it)"
            print(f"step {info.step:>8}  attempt {info.attempt}  {when}  {what}")
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verify:
    """Read every byte of a run's checkpoints and compare it with what was committed."""

    location: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Directory or s3:// location of the run: <storage>/<name>."""
    step: int | None = None
    """Only the newest checkpoint of this step; all of them when left out."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        """Print the verdict on each; status 5 when one, or the journal, is damaged.

        Raises:
            ConfigError: There is no such checkpoint.
        """
        store = open_store(self.location)
        found = _survey(store, self.location)
        chosen = [i for i in found.checkpoints if self.step is None or i.step == self.step]
        if self.step is not None:
            chosen = chosen[:1]
        if not chosen:
            steps = ", ".join(str(info.step) for info in found.checkpoints) or "none"
            of_step = "" if self.step is None else f" of step {self.step}"
            raise ConfigError(
                problem=f"There is no committed checkpoint{of_step}.",
                way_out=f"There are: {steps}.",
            )
        report = []
        for info in chosen:
            problems = [info.problem] if info.problem else _problems(store, info)
            report.append({"step": info.step, "attempt": info.attempt, "problems": problems})
            if not self.json:
                verdict = "; ".join(problems) or f"ok, {info.bytes / 2**20:.1f} MiB read"
                print(f"step {info.step:>8}  attempt {info.attempt}  {verdict}", flush=True)
        if self.json:
            print(json.dumps(report, indent=1))
        is_bad = found.damage or any(entry["problems"] for entry in report)
        return FailureKind.STORAGE.exit_code if is_bad else 0


_Command = (
    Annotated[Ls, tyro.conf.subcommand("ls")]
    | Annotated[Show, tyro.conf.subcommand("show")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Diff, tyro.conf.subcommand("diff")]
    | Annotated[Save, tyro.conf.subcommand("save")]
    | Annotated[Prune, tyro.conf.subcommand("prune")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Import, tyro.conf.subcommand("import")]
)


def run(arguments: Sequence[str]) -> int:
    """Run one `raydist ckpt` command; status 5 when a checkpoint does not verify.

    Raises:
        ConfigError: There is no run, or no such checkpoint, at that location.
    """
    command: Command = tyro.cli(_Command, args=list(arguments), prog="raydist ckpt")  # type: ignore[arg-type]
    return command.run()


def _survey(store: ObjectStore, location: str) -> Survey:
    found = survey(store)
    if not found.checkpoints and not found.damage and not has_uncommitted_objects(store):
        raise ConfigError(
            problem=f"There is no checkpoint and no journal of one at {location}.",
            way_out="Name the run's own location: <storage>/<name>.",
        )
    for sentence in found.damage:
        print(f"damaged journal: {sentence}", file=sys.stderr, flush=True)
    return found


def _problems(store: ObjectStore, info: CheckpointInfo) -> list[str]:
    try:
        problems = verify_checkpoint(store, info.manifest)[1]
    except CheckpointError as error:
        problems = [str(error)]
    try:
        if problems and info.known_by == "journal" and was_pruned(store, info.manifest):
            return []  # by its run, while it was being read: the journal has ended it
    except CheckpointError:
        return problems  # a damaged journal, which is reported by itself
    return problems
