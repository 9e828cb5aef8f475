# SPDX-License-Identifier: Apache-2.0
"""A corpus prepared by Ray Data while the ranks hold every CPU. Real: Ray, the file system."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import placement_group

from raydist.data import Corpus, find_source, map_in_process, prepare
from raydist.data.prepare import cut_pieces, write_piece
from raydist.data.ray_pieces import map_with_ray_data
from raydist.errors import DataError
from raydist.storage import open_store


@pytest.fixture(scope="module", autouse=True)
def _no_free_cpu() -> Iterator[None]:
    with tempfile.TemporaryDirectory(
        prefix="rdt-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        ray.init("local", num_cpus=1, include_dashboard=False, _temp_dir=folder)
        try:
            assert placement_group([{"CPU": 1}]).wait(60)
            yield
        finally:
            ray.shutdown()


@pytest.mark.timeout(240)
def test_pieces_are_prepared_while_ranks_hold_every_cpu(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(3):
        (texts / f"{number}.txt").write_bytes(bytes([97 + number]) * 1000)
    source = find_source(str(texts), storage=str(tmp_path))
    pieces = cut_pieces(source.files, piece_bytes=1000)
    assert len(pieces) == 3
    there, here = str(tmp_path / "there"), str(tmp_path / "here")
    assert map_with_ray_data(write_piece, pieces, there) == map_in_process(
        write_piece, pieces, here
    )

    manifest = prepare(source, map_with_ray_data)
    assert manifest.num_tokens == source.num_tokens == 3 * 1001
    corpus = Corpus(open_store(source.url), manifest, sequence_length=1001, seed=0, shuffle=False)
    assert corpus.batch(range(3))[:, 0].tolist() == [97, 98, 99]


@pytest.mark.timeout(240)
def test_file_that_changes_while_it_is_prepared_keeps_its_error(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("as it was listed")
    source = find_source(str(texts), storage=str(tmp_path))
    (texts / "a.txt").write_text("and now another text")
    with pytest.raises(DataError, match=r"a\.txt has 20 bytes; 16 when it was listed"):
        prepare(source, map_with_ray_data)
