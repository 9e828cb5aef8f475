# SPDX-License-Identifier: Apache-2.0
"""A user's own DeepSpeed JSON, taken as it is onto a RunConfig.

What raydist models is mapped, what only DeepSpeed models is passed through zero.extra,
``"auto"`` is resolved or refused by path, and all that cannot be is said at once. What the file
does not say stays as the recipe has it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from raydist.config.deepspeed_check import ObjectWithRepeats, as_json, walk
from raydist.config.deepspeed_mapping import Reader, Setting, get_field, world_problem
from raydist.config.run import RunConfig
from raydist.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DsConfigReport:
    """What became of a DeepSpeed configuration.

    Fields:
        source: Name of the file, for messages.
        base, config: The run before and after.
        mapped: Settings that became fields of RunConfig; target is the key.
        passed: Settings handed to DeepSpeed as they are; target is zero.extra.
        resolved: Settings that the file leaves open; value is what holds, target says why.
        expected_world_size: Ranks that the file's three batch fields imply, or None.
    """

    source: str
    base: RunConfig
    config: RunConfig
    mapped: list[Setting]
    passed: list[Setting]
    resolved: list[Setting]
    expected_world_size: int | None

    def render(self) -> str:
        """Return the report as text: ~ changes the run, = says the same, + is passed through."""
        lines = [f"{self.source} on run {self.config.name}"]
        for title, rows in (
            ("mapped onto the configuration", [self._mapped_row(s) for s in self.mapped]),
            ("passed to DeepSpeed as it is", [("+", s, s.target) for s in self.passed]),
            ("left open by the file", [("*", s, s.target) for s in self.resolved]),
        ):
            if not rows:
                continue
            lines.append(f"  {title}")
            named = [(sign, f"{s.path} = {as_json(s.value)}", text) for sign, s, text in rows]
            width = min(64, max(len(name) for _, name, _ in named))
            lines += [f"    {sign} {name:<{width}}  {text}" for sign, name, text in named]
        if self.expected_world_size:
            lines.append(f"  expects {self.expected_world_size} ranks")
        return "\n".join(lines)

    def _mapped_row(self, setting: Setting) -> tuple[str, Setting, str]:
        old, new = (get_field(c, setting.target) for c in (self.base, self.config))
        if old == new:
            return "=", setting, f"{setting.target}" + ("" if new is None else f": {new}")
        return "~", setting, f"{setting.target}: {old} -> {new}"


def check_world(report: DsConfigReport, world_size: int) -> None:
    """Hold the file's gradient_accumulation_steps against the ranks that the run got.

    Raises:
        ConfigError: The file's batch fields imply another number of ranks.
    """
    problem = world_problem(report.config, report.expected_world_size, world_size)
    if problem:
        raise ConfigError(problem=f"{report.source}: {problem.reason}.", way_out=problem.correction)


def read_ds_config(source: str | Path | Mapping[str, Any], base: RunConfig) -> DsConfigReport:
    """Take a DeepSpeed configuration onto a run.

    Args:
        source: Path of a JSON file, or its content.
        base: The run as the recipe and the command line have it.

    Raises:
        ConfigError: The file cannot be read, or holds what raydist cannot take; one error
            names every such setting by its path, with the correction. Or the recipe's own
            zero.extra cannot go to DeepSpeed.
    """
    name, tree = _load(source)
    walked = walk(tree)
    reader = Reader(
        base=base,
        sections=frozenset(tree),
        leaves=walked.leaves,
        problems=walked.problems,
    )
    expected = reader.read_batch()
    reader.read_precision()
    reader.read_strategy()
    reader.read_optimizer()
    reader.read_schedule()
    reader.read_rest()
    config = reader.apply()
    workers = base.scaling.planned_workers
    if config and workers:
        problem = world_problem(config, expected, workers)
        reader.problems += [problem] if problem else []
    if config is None or reader.problems:
        found = list(dict.fromkeys(str(problem) for problem in reader.problems))
        count = "1 setting" if len(found) == 1 else f"{len(found)} settings"
        raise ConfigError(
            problem=f"{name} holds {count} that raydist cannot take:\n"
            + "\n".join(f"  - {line}" for line in found),
            way_out="Correct the file; the run's own configuration is unchanged.",
        )
    return DsConfigReport(
        source=name,
        base=base,
        config=config,
        mapped=reader.mapped,
        passed=reader.passed,
        resolved=reader.resolved,
        expected_world_size=expected,
    )


def _load(source: str | Path | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    if isinstance(source, Mapping):
        return "the DeepSpeed configuration", source
    path = Path(source).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            problem=f"There is no DeepSpeed configuration at {path.absolute()}.",
            way_out="Give --ds-config the path of a JSON file.",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            problem=f"{path} cannot be read as text: {error}.",
            way_out="Give --ds-config the path of a JSON file in UTF-8.",
        ) from error
    try:
        tree = json.loads(
            text,
            object_pairs_hook=ObjectWithRepeats,
            parse_constant=partial(_refuse_number, path),
        )
    except json.JSONDecodeError as error:
        line = text.split("\n")[error.lineno - 1].strip()
        raise ConfigError(
            problem=f"{path}, line {error.lineno}, column {error.colno}: {error.msg}"
            + (f" in {line!r}." if line else "."),
            way_out="Write plain JSON: no comments, no comma after the last entry.",
        ) from error
    if not isinstance(tree, Mapping):
        raise ConfigError(
            problem=f"{path} holds {as_json(tree)} where an object is needed.",
            way_out='Begin the file with "{".',
        )
    return str(path), tree


def _refuse_number(path: Path, text: str) -> float:
    raise ConfigError(
        problem=f"{path} holds {text}, which is no JSON number.",
        way_out="Write a finite number.",
    )
