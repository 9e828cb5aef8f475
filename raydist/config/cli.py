# SPDX-License-Identifier: Apache-2.0
"""The command line of a job: a recipe's name, then typed overrides of its fields."""

from __future__ import annotations

import contextlib
import difflib
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from raydist.config.deepspeed_import import DsConfigReport, read_ds_config
from raydist.config.run import RunConfig
from raydist.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class _CommandLine:
    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    dry_run: bool = False
    """Print the resolved configuration, batch, memory plan and placement; touch nothing."""
    takeover: bool = False
    """Replace another driver that is training this run; it can never commit again."""
    allow_config_change: bool = False
    """Resume although the configuration changes the mathematics."""
    ds_config: Path | None = None
    """A DeepSpeed JSON of your own, mapped onto the configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the user asked for.

    Fields:
        recipe: Name of the recipe it began from.
        ds_report: How --ds-config was mapped, None without one.
    """

    recipe: str
    config: RunConfig
    dry_run: bool = False
    takeover: bool = False
    allow_config_change: bool = False
    ds_report: DsConfigReport | None = None


def parse_request(
    recipes: Mapping[str, Callable[[], RunConfig]], arguments: Sequence[str], *, program: str
) -> Request:
    """Parse `[RECIPE] [--section.field value ...]`. An unknown flag exits with status 2.

    Args:
        recipes: By name; the first is the default.
        arguments: The command line without the program's name.
        program: Name to show in the help.

    Raises:
        ConfigError: No such recipe (the nearest is offered), or values that cannot be.
    """
    # The deepspeed launcher adds this flag; the environment says the same.
    rest = [a for a in arguments if not a.startswith("--local_rank=")]
    name = next(iter(recipes))
    if rest and not rest[0].startswith("-"):
        name = rest.pop(0)
    if name not in recipes:
        near = difflib.get_close_matches(name, recipes, n=1, cutoff=0.4)
        raise ConfigError(
            problem=f"There is no recipe {name!r}; this job has {', '.join(recipes)}.",
            way_out=f"Did you mean {near[0]}?" if near else "Choose one of these.",
        )
    line = _parse_line(
        rest,
        default=_CommandLine(config=recipes[name]()),
        prog=f"{program} {name}",
        description=recipes[name].__doc__ or "",
    )
    config, report = line.config, None
    if line.ds_config is not None:
        report = read_ds_config(line.ds_config, config)
        config = report.config
    return Request(
        recipe=name,
        config=config,
        dry_run=line.dry_run,
        takeover=line.takeover,
        allow_config_change=line.allow_config_change,
        ds_report=report,
    )


def _parse_line(arguments: Sequence[str], *, default: _CommandLine, **texts: Any) -> _CommandLine:
    """Parse with tyro, but let a section's own error through: tyro puts it into a box.

    Raises:
        ConfigError: A section's values cannot be.
        SystemExit: tyro has said what is wrong, with status 2; or it printed the help.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(_CommandLine, default=default, args=arguments, **texts)
    except SystemExit as stop:
        wrapped = stop.__context__
        if wrapped is not None and isinstance(wrapped.__context__, ConfigError):
            raise wrapped.__context__ from None
        sys.stderr.write(said.getvalue())
        raise
