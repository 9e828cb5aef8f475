# SPDX-License-Identifier: Apache-2.0
"""The manifest's JSON and what it refuses. Nothing is faked."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.checkpoint.manifest import FORMAT, Manifest, Progress, checksum, decode
from raydist.checkpoint.objects import DataObject, StoredRange
from raydist.checkpoint.ranges import DTYPE_BYTES, TensorSpec, partition
from raydist.checkpoint.sealed import seal, unseal
from raydist.errors import CheckpointError

NAMES = st.text(min_size=1, max_size=12)
FINITE = st.floats(allow_nan=False, allow_infinity=False)


def manifest(
    shapes: dict[str, tuple[tuple[int, ...], str]], world_size: int, **changes: Any
) -> Manifest:
    specs = {k: TensorSpec(key=k, shape=shape, dtype=d) for k, (shape, d) in shapes.items()}
    ranges: dict[str, list[tuple[int, StoredRange]]] = {k: [] for k in specs}
    sizes = []
    for rank in range(world_size):
        at = 16
        for key, spec in specs.items():
            offset, length = partition(spec.numel, world_size=world_size, rank=rank)
            stored = StoredRange(offset=offset, length=length, byte_start=at)
            ranges[key].append((rank, stored))
            at += length * DTYPE_BYTES[spec.dtype]
        sizes.append(at)
    facts: dict[str, Any] = {
        "run": "toy",
        "attempt": 3,
        "world_size": world_size,
        "strategy": "zero3",
        "precision": "bf16",
        "config_hash": "0f",
        "corpus": "c0",
        "created_unix_s": 1.7e9,
        "versions": {"torch": "2.13.0"},
        "progress": Progress(step=7, data_position=56, epoch=1, tokens=448, skipped_steps=2),
        "scalars": {"adam_step": 5.0},
        "tensors": specs,
        "objects": tuple(
            DataObject(
                key=f"rank-{rank}",
                bytes=size,
                crc32c=rank,
                block_bytes=1 << 20,
                blocks=array("I", [rank]),
            )
            for rank, size in enumerate(sizes)
        ),
        "ranges": {key: tuple(stored) for key, stored in ranges.items()},
    }
    return Manifest(**(facts | changes))


SMALL = manifest({"master/w": ((4, 3), "F32"), "buffer/n": ((), "I64")}, 2)


@settings(deadline=None, database=None, max_examples=60)
@given(
    shapes=st.dictionaries(
        NAMES,
        st.tuples(
            st.lists(st.integers(0, 9), max_size=4).map(tuple), st.sampled_from(list(DTYPE_BYTES))
        ),
        max_size=4,
    ),
    world_size=st.integers(1, 5),
    scalars=st.dictionaries(NAMES, FINITE, max_size=3),
    created_unix_s=FINITE,
)
def test_manifest_of_any_tensors_survives_encode_and_decode(
    shapes: dict[str, tuple[tuple[int, ...], str]],
    world_size: int,
    scalars: dict[str, float],
    created_unix_s: float,
) -> None:
    made = manifest(shapes, world_size, scalars=scalars, created_unix_s=created_unix_s)
    made.check()
    assert decode(made.encode(), where="here") == made


def test_manifest_is_one_plain_json_object_of_format_1() -> None:
    tree = unseal(SMALL.encode())
    assert tree["format"] == FORMAT == 1
    assert tree["tensors"]["master/w"] == [[4, 3], "F32"]
    assert tree["ranges"]["master/w"] == [[0, 0, 6, 16, 2]]
    assert tree["ranges"]["buffer/n"] == [[0, 0, 1, 40, 1], [1, 1, 0, 40, 1]]
    assert [o["key"] for o in tree["objects"]] == ["rank-0", "rank-1"]
    assert [o["blocks"] for o in tree["objects"]] == ["AAAAAA==", "AQAAAA=="]
    assert SMALL.total_bytes == sum(o["bytes"] for o in tree["objects"])


def test_manifest_of_a_newer_format_is_refused_with_both_numbers() -> None:
    tree = {"format": 2, "all": "else is new"}
    with pytest.raises(CheckpointError, match=r"the-key has format 2; .* up to 1") as caught:
        decode(seal(tree), where="the-key")
    assert "Upgrade" in caught.value.way_out


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe\x00",
        b"not json",
        b"[]",
        b"null",
        b"7",
        b'"text"',
        b"{}",
        b'{"format": 1}',
        b'{"format": "1"}',
        b'{"format": null}',
        b"[" * 100_000,
        SMALL.encode()[:-1],
        SMALL.encode()[: len(SMALL.encode()) // 2],
    ],
)
def test_garbage_instead_of_a_manifest_is_refused_by_name(raw: bytes) -> None:
    with pytest.raises(CheckpointError, match="the-key is not a manifest"):
        decode(raw, where="the-key")


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Manifest)])
def test_manifest_without_a_field_or_with_null_in_it_is_refused(field: str) -> None:
    tree = unseal(SMALL.encode())
    del tree[field]
    with pytest.raises(CheckpointError):
        decode(seal(tree), where="here")
    if field in {"format", "progress", "tensors", "objects", "ranges"}:
        tree[field] = None
        with pytest.raises(CheckpointError):
            decode(seal(tree), where="here")


def move_out(tree: dict[str, Any]) -> None:
    tree["objects"][1]["bytes"] -= 1


def move_before(tree: dict[str, Any]) -> None:
    tree["ranges"]["master/w"][0][3] = -4


def point_past_the_objects(tree: dict[str, Any]) -> None:
    tree["ranges"]["master/w"][0][0] = 1


def point_before_the_objects(tree: dict[str, Any]) -> None:
    tree["ranges"]["master/w"][0][0] = -1


def drop_a_range(tree: dict[str, Any]) -> None:
    del tree["ranges"]["master/w"][0]


def double_a_range(tree: dict[str, Any]) -> None:
    tree["ranges"]["master/w"] *= 2


def drop_a_tensor(tree: dict[str, Any]) -> None:
    del tree["tensors"]["master/w"]


def drop_ranges(tree: dict[str, Any]) -> None:
    del tree["ranges"]["master/w"]


def invent_a_dtype(tree: dict[str, Any]) -> None:
    tree["tensors"]["master/w"][1] = "F12"


def grow_the_tensor(tree: dict[str, Any]) -> None:
    tree["tensors"]["master/w"][0] = [4, 4]


def drop_a_block(tree: dict[str, Any]) -> None:
    tree["objects"][0]["blocks"] = ""


def have_half_a_block(tree: dict[str, Any]) -> None:
    tree["objects"][0]["blocks"] = "AAA="


def have_blocks_of_other_letters(tree: dict[str, Any]) -> None:
    tree["objects"][0]["blocks"] = "AA AAA=="


def repeat_a_range_too_often(tree: dict[str, Any]) -> None:
    tree["ranges"]["master/w"][0][4] = 3


def leave_out_the_count(tree: dict[str, Any]) -> None:
    del tree["ranges"]["master/w"][0][4]


def have_no_block_size(tree: dict[str, Any]) -> None:
    tree["objects"][0]["block_bytes"] = 0


@pytest.mark.parametrize(
    "change",
    [
        move_out,
        move_before,
        point_past_the_objects,
        point_before_the_objects,
        drop_a_range,
        double_a_range,
        drop_a_tensor,
        drop_ranges,
        invent_a_dtype,
        grow_the_tensor,
        drop_a_block,
        have_no_block_size,
        have_half_a_block,
        have_blocks_of_other_letters,
        repeat_a_range_too_often,
        leave_out_the_count,
    ],
)
def test_manifest_whose_parts_do_not_add_up_is_refused(
    change: Callable[[dict[str, Any]], None],
) -> None:
    tree = unseal(SMALL.encode())
    change(tree)
    with pytest.raises(CheckpointError) as caught:
        decode(seal(tree), where="here")
    assert any(name in str(caught.value) for name in ("master/w", "rank-0", "F12", "here is not"))


def test_checksum_changes_with_any_bit() -> None:
    raw = SMALL.encode()
    sums = {checksum(raw)}
    for at in range(0, len(raw), 17):
        sums.add(checksum(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]))
    assert len(sums) == 1 + len(range(0, len(raw), 17))


def test_manifest_with_an_altered_value_is_refused_by_its_own_checksum() -> None:
    raw = SMALL.encode()
    assert b'"step":' in raw
    with pytest.raises(CheckpointError, match="its own checksum"):
        decode(raw.replace(b'"step":', b'"step":1', 1), where="here")
