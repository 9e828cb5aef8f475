# SPDX-License-Identifier: Apache-2.0
"""Which nodes a label selector admits."""

from __future__ import annotations

import pytest

from raydist.launch.labels import matches


@pytest.mark.parametrize(
    ("wanted", "value", "admits"),
    [
        ("spot", "spot", True),
        ("spot", "on-demand", False),
        ("spot", None, False),
        ("!spot", "on-demand", True),
        ("!spot", "spot", False),
        ("!spot", None, True),
        ("in(a,b)", "b", True),
        ("in(a, b)", "c", False),
        ("in(a,b)", None, False),
        ("!in(a,b)", "c", True),
        ("!in(a,b)", "a", False),
        ("!in(a,b)", None, True),
    ],
)
def test_selector_of_one_label(wanted: str, value: str | None, admits: bool) -> None:
    labels = {} if value is None else {"key": value}
    assert matches({"key": wanted}, labels) is admits


def test_selector_of_several_labels_needs_all() -> None:
    assert matches({"a": "1", "b": "!2"}, {"a": "1", "b": "3"})
    assert not matches({"a": "1", "b": "!2"}, {"a": "1", "b": "2"})
    assert matches({}, {"a": "1"})
