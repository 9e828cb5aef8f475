# SPDX-License-Identifier: Apache-2.0
"""Holds a DeepSpeed tree against the keys that DeepSpeed 0.19.8 has; knows no RunConfig."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raydist.config.deepspeed_keys import (
    ALIASES,
    AUTO,
    KNOWN,
    NO_EFFECT,
    REMOVED,
    RENAMED,
    RULES,
)

_NUMBERS = {"positive": int, "count": int, "integer": int, "number": float, "ratio": float}
_LARGEST = 2**63 - 1  # a larger count fits no tensor, and no float of DeepSpeed's
_WORDS = {
    "positive": "a whole number above 0",
    "count": "a whole number of at least 0",
    "integer": "a whole number",
    "number": "a number",
    "ratio": "a number in [0, 1]",
    "bool": "true or false",
    "text": "text",
    "list": "a list",
}


class Problem(NamedTuple):
    """One setting that cannot be used: where, why, and what to write instead."""

    path: str
    reason: str
    correction: str = ""

    def __str__(self) -> str:
        """Return the problem as one line."""
        return f"{self.path}: {self.reason}. {self.correction}".rstrip()


class ObjectWithRepeats(dict[str, Any]):
    """A JSON object that remembers the keys it was given twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        """Take the pairs as json's object_pairs_hook gives them."""
        super().__init__(pairs)
        keys = [key for key, _ in pairs]
        self.repeats = sorted({key for key in keys if keys.count(key) > 1})


@dataclass(kw_only=True, slots=True)
class Walk:
    """Every value of a DeepSpeed tree by its dotted path, and what is wrong with the tree."""

    leaves: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def walk(tree: Mapping[str, Any]) -> Walk:
    """Check a tree against KNOWN; aliases become the names that raydist writes.

    Leaves may still be ``"auto"``; whoever calls resolves or refuses those. A null is dropped:
    DeepSpeed takes it as an absent key.
    """
    result = Walk()
    _walk_section(tree, KNOWN, "", result)
    for path, rule in RULES.items():
        value = result.leaves.get(path, AUTO)
        if value == AUTO or value in rule.allowed:
            continue
        # A path with no value at all may hold a secret, so its value is not repeated.
        shown = f"{as_json(value)} is not possible: " if rule.allowed else ""
        result.problems.append(Problem(path, shown + rule.reason, rule.correction))
    result.problems += _find_repeats(tree, "")
    return result


def _find_repeats(value: object, path: str) -> list[Problem]:
    found: list[Problem] = []
    if isinstance(value, ObjectWithRepeats):
        found += [
            Problem(path + key, "it stands here more than once", "Keep one of them.")
            for key in value.repeats
        ]
    if isinstance(value, Mapping):
        for key, item in value.items():
            found += _find_repeats(item, f"{path}{key}.")
    elif isinstance(value, (list, tuple)):
        for item in value:
            found += _find_repeats(item, path)
    return found


def _walk_section(
    tree: Mapping[str, Any], known: Mapping[str, Any], prefix: str, result: Walk
) -> None:
    for key, value in tree.items():
        given = prefix + str(key)
        path = ALIASES.get(given, given)
        name = path.removeprefix(prefix)
        if path != given and name in tree:
            result.problems.append(
                Problem(given, f"it is {path} by an older name", "Keep one of them.")
            )
        elif path in REMOVED:
            result.problems.append(Problem(path, "DeepSpeed 0.19.8 has removed it", REMOVED[path]))
        elif path in RENAMED:
            result.problems.append(
                Problem(path, "DeepSpeed does not read it", f"Its name is {RENAMED[path]}.")
            )
        elif name not in known and "*" not in known:
            result.problems.append(
                Problem(path, "DeepSpeed 0.19.8 has no such key", _nearest(str(key), known, prefix))
            )
        elif value is not None:
            _walk_value(value, known.get(name, "any"), path, result)


def _walk_value(value: Any, kind: Any, path: str, result: Walk) -> None:
    if isinstance(kind, Mapping):
        if isinstance(value, Mapping):
            _walk_section(value, kind, path + ".", result)
            return
        inside = '{"stage": 3}' if path == "zero_optimization" else '{"enabled": true}'
        hint = f'Write "{path}": {inside}.' if {"stage", "enabled"} & kind.keys() else ""
        result.problems.append(
            Problem(path, f"{as_json(value)} stands where a section is needed", hint)
        )
        return
    if value == AUTO and isinstance(value, str):
        result.leaves[path] = value
        return
    inner = [p for p, v in _inside(value, path) if v == AUTO and isinstance(v, str)]
    result.problems += [
        Problem(p, '"auto" cannot be resolved here', "Write the value, or leave it out.")
        for p in inner
    ]
    checked, problem = check_value(value, kind, path)
    if problem:
        result.problems.append(problem)
    elif not inner:
        result.leaves[path] = checked


def _inside(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _inside(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _inside(item, f"{path}[{index}]")
    else:
        yield path, value


def check_value(value: Any, kind: str, path: str) -> tuple[Any, Problem | None]:
    """Return the value as DeepSpeed wants it, or what is wrong with it.

    A whole number may be written as 5e8; text that merely quotes a number is refused.
    """
    if kind == "any":
        return value, None
    wanted = _WORDS[kind]
    if isinstance(value, str) and kind != "text":
        unquoted = _unquote(value, kind)
        if unquoted:
            return value, Problem(
                path,
                f"the text {as_json(value)} stands where {wanted} is needed",
                f"Write {unquoted} without quotes.",
            )
    fits = {
        "bool": isinstance(value, bool),
        "text": isinstance(value, str),
        "list": isinstance(value, (list, tuple)),
    }.get(kind)
    if fits is None:
        number, fits = _as_number(value, kind)
        value = number if fits else value
    if fits:
        return value, None
    return value, Problem(path, f"{as_json(value)} stands where {wanted} is needed")


def _as_number(value: Any, kind: str) -> tuple[Any, bool]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value, False
    if not -_LARGEST <= value <= _LARGEST:  # also false for NaN
        return value, False
    if _NUMBERS[kind] is int:
        whole = int(value)
        lowest = {"positive": 1, "count": 0}.get(kind)
        return whole, whole == value and (lowest is None or whole >= lowest)
    return value, kind != "ratio" or 0 <= value <= 1


def _unquote(text: str, kind: str) -> str:
    plain = text.strip()
    if kind == "bool":
        return plain.lower() if plain.lower() in ("true", "false") else ""
    if kind == "list":
        return plain if plain.startswith("[") else ""
    return plain if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", plain) else ""


def _nearest(key: str, known: Mapping[str, Any], prefix: str) -> str:
    homes = [path for path in _all_paths(KNOWN) if path.rpartition(".")[2] == key]
    if homes:
        return f"It belongs at {homes[0]}."
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if near:
        return f"Did you mean {prefix}{near[0]}?"
    near = difflib.get_close_matches(key, list(_all_paths(KNOWN)), n=1, cutoff=0.6)
    return f"Did you mean {near[0]}?" if near else "Leave it out."


def _all_paths(known: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, kind in known.items():
        if key != "*":
            yield prefix + key
        if isinstance(kind, Mapping):
            yield from _all_paths(kind, f"{prefix}{key}.")


def no_effect(path: str) -> str:
    """Return why a setting changes nothing in a raydist run, or ""."""
    parts = path.split(".")
    prefixes = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
    return next((NO_EFFECT[prefix] for prefix in prefixes if prefix in NO_EFFECT), "")


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree whose dotted paths are the given ones."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *sections, key = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    return tree


def as_json(value: Any) -> str:
    """Return a value as it would stand in the file, shortened to one line."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
