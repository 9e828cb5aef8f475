# SPDX-License-Identifier: Apache-2.0
"""Rows to lines and back."""

from __future__ import annotations

import json
import math

import pytest

from raydist.metrics.rows import (
    attempt_key,
    decode_row,
    encode_row,
    is_skipped,
    parse_segment_key,
    segment_key,
)


def _strict_json(line: bytes) -> object:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_keys_of_an_attempt_follow_each_other() -> None:
    first = attempt_key(3)
    keys = [segment_key(first, index) for index in (0, 1, 12)]
    assert keys == [
        "metrics/attempt-0003.jsonl",
        "metrics/attempt-0003.0001.jsonl",
        "metrics/attempt-0003.0012.jsonl",
    ]
    assert [parse_segment_key(key) for key in keys] == [(3, 0), (3, 1), (3, 12)]
    assert parse_segment_key(attempt_key(12_345)) == (12_345, 0)


@pytest.mark.parametrize("key", ["metrics/attempt-0003.jsonl.bak", "metrics/attempt-x.jsonl"])
def test_other_objects_are_no_segments(key: str) -> None:
    assert parse_segment_key(key) is None


@pytest.mark.parametrize(
    ("value", "name"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")]
)
def test_a_nonfinite_float_is_null_with_its_name_beside_it(value: float, name: str) -> None:
    line = encode_row({"attempt": 1, "step": 2, "loss": value})
    assert line.endswith(b"\n")
    assert _strict_json(line) == {"attempt": 1, "step": 2, "loss": None, "loss_nonfinite": name}


def test_nonfinite_floats_are_found_inside_lists_and_dicts() -> None:
    row = {"attempt": 1, "step": 2, "norms": [1.5, math.inf], "by_rank": {"r0": (math.nan,)}}
    assert _strict_json(encode_row(row)) == {
        "attempt": 1,
        "step": 2,
        "norms": [1.5, None],
        "by_rank": {"r0": [None]},
        "norms.1_nonfinite": "inf",
        "by_rank.r0.0_nonfinite": "nan",
    }


def test_a_row_comes_back_and_has_one_line_whatever_its_text() -> None:
    row = {"attempt": 1, "step": 2, "loss": 0.1 + 0.2, "note": "two\nlines \u2028 \u00e9"}
    line = encode_row(row)
    assert line.count(b"\n") == 1
    assert decode_row(line) == row


@pytest.mark.parametrize("row", [{"step": 1}, {"attempt": 1}, {"attempt": 1, "step": 1.0}])
def test_a_row_without_its_key_is_refused(row: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="metrics row has"):
        encode_row(row)


def test_a_value_that_json_does_not_know_is_refused() -> None:
    with pytest.raises(TypeError):
        encode_row({"attempt": 1, "step": 1, "loss": object()})


@pytest.mark.parametrize(
    "line", [b"", b'{"attempt":1,"st', b"[1]", b"\0\0", b'{"step":1}', b"\xff"]
)
def test_what_is_no_whole_row_is_none(line: bytes) -> None:
    assert decode_row(line) is None


def test_a_step_is_skipped_for_its_loss_its_gradient_or_its_word() -> None:
    assert is_skipped({"loss": None, "loss_nonfinite": "nan"})
    assert is_skipped({"loss": 2.0, "grad_norm": None, "grad_norm_nonfinite": "inf"})
    assert is_skipped({"loss": 2.0, "skipped": True})
    assert not is_skipped({"loss": 2.0, "skipped": False})
