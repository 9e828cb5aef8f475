# SPDX-License-Identifier: Apache-2.0
"""Size, names and docstrings of the package's files. Nothing is faked."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

_PACKAGE = Path(__file__).parents[2] / "raydist"
_FILES = sorted(_PACKAGE.rglob("*.py"))
_IDS = [str(path.relative_to(_PACKAGE)) for path in _FILES]
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_files_of_the_package_are_found() -> None:
    assert len(_FILES) > 50


@pytest.mark.parametrize("path", _FILES, ids=_IDS)
def test_file_has_at_most_500_lines_and_its_license(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 500
    assert lines[0] == "# SPDX-License-Identifier: Apache-2.0"


@pytest.mark.parametrize("path", _FILES, ids=_IDS)
def test_file_is_named_for_what_it_holds(path: Path) -> None:
    names = {part.removesuffix(".py") for part in path.relative_to(_PACKAGE).parts}
    assert not names & {"util", "utils", "common", "helper", "helpers", "base", "misc"}


@pytest.mark.parametrize("path", _FILES, ids=_IDS)
def test_public_functions_and_classes_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bare = [name for name, node in _public(tree, "") if not ast.get_docstring(node)]
    assert bare == []


def _is_overload(node: ast.AST) -> bool:
    """Whether it only types the function that follows, which has the docstring (ruff D418)."""
    return any(getattr(one, "id", "") == "overload" for one in getattr(node, "decorator_list", ()))


def _public(
    node: ast.Module | ast.ClassDef, prefix: str
) -> Iterator[tuple[str, _Function | ast.ClassDef]]:
    """Functions and classes that are reachable by public names; inner functions are not."""
    for child in node.body:
        is_public = isinstance(child, _Function | ast.ClassDef) and not child.name.startswith("_")
        if is_public and not _is_overload(child):
            yield prefix + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from _public(child, f"{prefix}{child.name}.")
