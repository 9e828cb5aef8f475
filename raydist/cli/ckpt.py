# SPDX-License-Identifier: Apache-2.0
"""`raydist ckpt ls | verify | save RUN`: what a run has saved, and whether it can be believed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro

from raydist.checkpoint.inspect import (
    CheckpointInfo,
    has_uncommitted_objects,
    list_checkpoints,
    verify_checkpoint,
)
from raydist.cli.ckpt_save import Save, save
from raydist.clock import SystemClock
from raydist.errors import CheckpointError, ConfigError, FailureKind
from raydist.storage import ObjectStore, open_store


@dataclass(frozen=True, kw_only=True, slots=True)
class Ls:
    """List the committed checkpoints of a run, newest first."""

    run: tyro.conf.Positional[str]
    """Directory or s3:// location of the run: <storage>/<name>."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verify:
    """Read every byte of a run's checkpoints and compare it with what was committed."""

    run: tyro.conf.Positional[str]
    """Directory or s3:// location of the run: <storage>/<name>."""
    step: int | None = None
    """Only the newest checkpoint of this step; all of them when left out."""
    json: bool = False
    """Print JSON."""


_Command = (
    Annotated[Ls, tyro.conf.subcommand("ls")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Save, tyro.conf.subcommand("save")]
)


def run(arguments: Sequence[str]) -> int:
    """Run one `raydist ckpt` command; status 5 when a checkpoint does not verify.

    Raises:
        ConfigError: There is no run at that location.
    """
    command: Ls | Verify | Save = tyro.cli(_Command, args=list(arguments), prog="raydist ckpt")  # type: ignore[arg-type]
    store = open_store(command.run)
    if isinstance(command, Save):
        return save(command, store, clock=SystemClock())
    found = list_checkpoints(store)
    if not found and not has_uncommitted_objects(store):
        raise ConfigError(
            problem=f"There is no checkpoint and no journal of one at {command.run}.",
            way_out="Name the run's own location: <storage>/<name>.",
        )
    if isinstance(command, Ls):
        return _ls(found, as_json=command.json)
    return _verify(store, found, step=command.step, as_json=command.json)


def _ls(found: list[CheckpointInfo], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps([asdict(info) for info in found], indent=1))
        return 0
    if not found:
        print("objects, but no committed checkpoint")
    for info in found:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.unix_s))
        what = info.problem or (
            f"{info.strategy} on {info.world_size}, {info.bytes / 2**20:.1f} MiB"
        )
        print(f"step {info.step:>8}  attempt {info.attempt}  {when}  {what}")
    return 0


def _verify(
    store: ObjectStore, found: list[CheckpointInfo], *, step: int | None, as_json: bool
) -> int:
    chosen = [info for info in found if step is None or info.step == step]
    if step is not None:
        chosen = chosen[:1]
    if not chosen:
        steps = ", ".join(str(info.step) for info in found) or "none"
        of_step = "" if step is None else f" of step {step}"
        raise ConfigError(
            problem=f"There is no committed checkpoint{of_step}.", way_out=f"There are: {steps}."
        )
    report = []
    for info in chosen:
        problems = [info.problem] if info.problem else _problems(store, info)
        report.append({"step": info.step, "attempt": info.attempt, "problems": problems})
        if not as_json:
            verdict = "; ".join(problems) or f"ok, {info.bytes / 2**20:.1f} MiB read"
            print(f"step {info.step:>8}  attempt {info.attempt}  {verdict}")
    if as_json:
        print(json.dumps(report, indent=1))
    is_bad = any(entry["problems"] for entry in report)
    return FailureKind.STORAGE.exit_code if is_bad else 0


def _problems(store: ObjectStore, info: CheckpointInfo) -> list[str]:
    try:
        return verify_checkpoint(store, info.manifest)[1]
    except CheckpointError as error:
        return [str(error)]
