# SPDX-License-Identifier: Apache-2.0
"""From files to a prepared corpus, in this process. Nothing is faked."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from raydist.data import Corpus, find_source, map_in_process, prepare, read_manifest
from raydist.data.corpus import MANIFEST_KEY, CorpusPart
from raydist.data.prepare import Piece, SourceFile, cut_pieces
from raydist.errors import DataError
from raydist.storage import open_store
from raydist.storage.open import absolute_url, parse_url

_FILES = {
    "b.txt": b"second",
    "a.md": b"first\n",
    "empty.txt": b"",
    "nested/deeper/z.py": b"print('\xff\xfe\x00')",  # not UTF-8
    "nested/é ü.txt": "naïve".encode(),
}
_IN_ORDER = ["a.md", "b.txt", "empty.txt", "nested/é ü.txt", "nested/deeper/z.py"]
"""As they are walked: names in order, then folders in order."""
_LEFT_OUT = {"picture.png": b"\x89PNG", "no_suffix": b"x", "__pycache__/m.py": b"cached"}


def _write(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return _write(tmp_path / "texts", _FILES | _LEFT_OUT)


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return absolute_url(str(tmp_path / "runs"))


def _expected_tokens() -> list[int]:
    tokens: list[int] = []
    for name in _IN_ORDER:
        tokens += [*_FILES[name], 256]
    return tokens


def _tokens(url: str) -> list[int]:
    store = open_store(url)
    manifest = read_manifest(store, where=url)
    assert manifest is not None
    raw = b"".join(store.get(part.key) for part in manifest.parts)
    return np.frombuffer(raw, "<u2").tolist()


def test_prepare_directory_holds_every_byte_and_ends_documents_with_256(
    texts: Path, storage: str
) -> None:
    source = find_source(str(texts), storage=storage)
    manifest = prepare(source, map_in_process)
    assert _tokens(source.url) == _expected_tokens()
    assert manifest.num_documents == len(_FILES)
    assert manifest.vocab_size == 257
    corpus = Corpus(open_store(source.url), manifest, sequence_length=5, seed=0, shuffle=False)
    whole = corpus.num_samples * 5
    assert corpus.batch(range(corpus.num_samples)).ravel().tolist() == _expected_tokens()[:whole]


def test_prepare_number_of_tokens_is_known_before_anything_is_written(
    texts: Path, storage: str
) -> None:
    source = find_source(str(texts), storage=storage)
    assert not source.is_prepared
    assert not Path(storage.removeprefix("file://")).exists()
    assert source.num_tokens == len(_expected_tokens())
    assert prepare(source, map_in_process).num_tokens == source.num_tokens
    found = find_source(str(texts), storage=storage)
    assert found.is_prepared
    assert (found.num_tokens, found.url) == (source.num_tokens, source.url)


def test_prepare_again_writes_nothing(texts: Path, storage: str) -> None:
    source = find_source(str(texts), storage=storage)
    first = prepare(source, map_in_process)

    def refuse(
        function: Callable[[Piece, str], CorpusPart], pieces: list[Piece], url: str
    ) -> list[CorpusPart]:
        raise AssertionError("mapped again")

    assert prepare(source, refuse) == first
    assert prepare(find_source(str(texts), storage=storage), refuse) == first


def test_prepare_over_several_pieces_keeps_the_order_of_documents(
    tmp_path: Path, storage: str
) -> None:
    rng = np.random.default_rng(0)
    files = {f"{name}.txt": rng.bytes(3 << 20) for name in "abc"}
    source = find_source(str(_write(tmp_path / "large", files)), storage=storage)
    manifest = prepare(source, map_in_process)
    assert [part.num_documents for part in manifest.parts] == [2, 1]
    assert manifest.num_tokens == source.num_tokens == 3 * ((3 << 20) + 1)
    tokens = np.asarray(_tokens(source.url))
    ends = np.flatnonzero(tokens == 256)
    assert ends.tolist() == [(n + 1) * ((3 << 20) + 1) - 1 for n in range(3)]
    assert bytes(tokens[tokens != 256].astype(np.uint8)) == b"".join(files.values())


def test_prepare_file_that_grew_is_refused_with_both_sizes(texts: Path, storage: str) -> None:
    source = find_source(str(texts), storage=storage)
    (texts / "b.txt").write_bytes(b"second and more")
    with pytest.raises(DataError, match=r"b\.txt has 15 bytes; 6 when it was listed"):
        prepare(source, map_in_process)
    assert open_store(source.url).size(MANIFEST_KEY) is None


def test_prepare_file_that_vanished_is_refused_by_name(texts: Path, storage: str) -> None:
    source = find_source(str(texts), storage=storage)
    (texts / "a.md").unlink()
    with pytest.raises(DataError, match=r"a\.md cannot be read: No such file"):
        prepare(source, map_in_process)
    assert open_store(source.url).size(MANIFEST_KEY) is None


def test_prepare_corpus_that_vanished_is_refused_and_not_written_empty(
    texts: Path, storage: str
) -> None:
    prepare(find_source(str(texts), storage=storage), map_in_process)
    source = find_source(str(texts), storage=storage)
    open_store(source.url).delete(MANIFEST_KEY)
    with pytest.raises(DataError, match="is no longer there"):
        prepare(source, map_in_process)
    assert open_store(source.url).size(MANIFEST_KEY) is None


def test_source_changed_in_size_is_another_corpus(texts: Path, storage: str) -> None:
    before = find_source(str(texts), storage=storage)
    (texts / "b.txt").write_bytes(b"longer than it was")
    after = find_source(str(texts), storage=storage)
    assert before.url != after.url


def test_source_prepared_directory_is_used_where_it_lies(
    texts: Path, storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = find_source(str(texts), storage=storage).url
    prepare(find_source(str(texts), storage=storage), map_in_process)
    folder = Path(parse_url(url).path)
    for source in (url, str(folder)):
        found = find_source(source, storage="s3://elsewhere/never-asked")
        assert found.is_prepared
        assert found.num_tokens == len(_expected_tokens())
    monkeypatch.chdir(folder.parent)
    relative = find_source(folder.name, storage=storage)
    monkeypatch.chdir(tmp_path)  # as a worker elsewhere
    assert _tokens(relative.url) == _expected_tokens()


def test_source_in_the_home_directory_is_found(
    texts: Path, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(texts.parent))
    source = find_source("~/texts", storage=storage)
    assert source.files[0].path == str(texts / "a.md")


@pytest.mark.parametrize("source", ["", "nowhere", "~nobody-of-that-name/x", "file:///nowhere/at"])
def test_source_that_is_nothing_is_refused_by_name(
    source: str, storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, {"a.txt": b"the working directory is not meant"})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"data.source='{source}' is neither 'python-stdlib'"):
        find_source(source, storage=storage)


def test_source_file_is_refused_as_no_directory(texts: Path, storage: str) -> None:
    with pytest.raises(DataError, match="nor a directory of text"):
        find_source(str(texts / "b.txt"), storage=storage)


def test_source_directory_without_text_is_refused_with_the_suffixes(
    tmp_path: Path, storage: str
) -> None:
    (tmp_path / "void").mkdir()
    with pytest.raises(DataError, match=r"'void' holds no text file\.\n.*\.py.*\.txt"):
        find_source(str(tmp_path / "void"), storage=storage)


def test_source_python_stdlib_is_large_and_without_tests(storage: str) -> None:
    source = find_source("python-stdlib", storage=storage)
    assert len(source.files) > 100
    assert source.num_tokens > 1_000_000
    root = sysconfig.get_path("stdlib")
    parts = {part for file in source.files for part in Path(file.path).relative_to(root).parts}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert {os.path.splitext(file.path)[1] for file in source.files} == {".py"}
    assert find_source("python-stdlib", storage=storage) == source


def test_cut_pieces_keeps_all_files_in_order_and_none_empty() -> None:
    sizes = [0, 3, 10, 0, 0, 25, 4, 4, 4]
    files = [SourceFile(path=f"/{n}", size=size) for n, size in enumerate(sizes)]
    pieces = cut_pieces(files, piece_bytes=10)
    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    assert [file for piece in pieces for file in piece.files] == files
    for piece in pieces[:-1]:
        tokens = [file.size + 1 for file in piece.files]
        assert sum(tokens) >= 10 > sum(tokens[:-1])


def test_cut_pieces_of_empty_files_does_not_pile_up() -> None:
    files = [SourceFile(path=f"/{n}", size=0) for n in range(1000)]
    assert [len(piece.files) for piece in cut_pieces(files, piece_bytes=100)] == [100] * 10


def test_cut_pieces_of_nothing_is_nothing() -> None:
    assert cut_pieces([]) == []
