# SPDX-License-Identifier: Apache-2.0
"""From files to a prepared corpus: list, cut into pieces, tokenize each piece, write a manifest.

Listing and cutting are pure of Ray; whoever has workers maps ``write_piece`` over the pieces
(``raydist.data.ray_pieces`` does it with Ray Data).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from awscrt import checksums

from raydist.data.corpus import FORMAT, MANIFEST_KEY, CorpusManifest, CorpusPart, read_manifest
from raydist.errors import DataError
from raydist.storage import open_store

STDLIB = "python-stdlib"
END_OF_DOCUMENT = 256
BYTES_VOCABULARY = 257
_PIECE_BYTES = 4 << 20
_STDLIB_EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py", ".json", ".c", ".h", ".html"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One document to be read: absolute path, and its size and age when it was listed."""

    path: str
    size: int
    modified_ns: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The files of one corpus part, in stream order."""

    index: int
    files: tuple[SourceFile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSource:
    """What ``data.source`` names.

    Fields:
        name: Folder of the corpus below ``<storage>/corpora``.
        url: Where the prepared corpus lies or will lie.
        files: Documents to prepare it from; empty when ``url`` must hold it already.
        num_tokens: Tokens it has or will have.
        vocab_size: Its ids are in [0, vocab_size).
    """

    name: str
    url: str
    files: tuple[SourceFile, ...]
    num_tokens: int
    vocab_size: int

    @property
    def is_prepared(self) -> bool:
        """Whether the corpus is there already."""
        return not self.files


def find_source(source: str, *, storage: str) -> CorpusSource:
    """Resolve ``data.source`` without writing anything.

    The number of tokens is known before anything is read: a byte is a token, and each
    document ends with one more.

    Raises:
        DataError: The source does not exist or holds no text.
    """
    if source == STDLIB:
        return _unprepared(source, _stdlib_files(), storage=storage)
    if "://" not in source and os.path.isdir(os.path.expanduser(source)):
        root = Path(os.path.expanduser(source)).resolve()
        source = str(root)  # Other nodes have other working and home directories.
        manifest = read_manifest(open_store(source), where=source)
        if manifest is None:
            files = tuple(_text_files(root, suffixes=_TEXT_SUFFIXES, excluded={"__pycache__"}))
            return _unprepared(root.name, files, storage=storage)
    elif "://" in source:
        manifest = read_manifest(open_store(source), where=source)
    else:
        manifest = None
    if manifest is None:
        raise DataError(
            problem=f"data.source={source!r} is neither {STDLIB!r}, nor a directory of text, nor a "
            "prepared corpus (no manifest.json there).",
            way_out="Set data.source to one of these.",
        )
    return CorpusSource(
        name=source,
        url=source,
        files=(),
        num_tokens=manifest.num_tokens,
        vocab_size=manifest.vocab_size,
    )


def _unprepared(name: str, files: tuple[SourceFile, ...], *, storage: str) -> CorpusSource:
    if not files:
        raise DataError(
            problem=f"data.source={name!r} holds no text file.",
            way_out=f"Point data.source at a directory with files ending in "
            f"{', '.join(sorted(_TEXT_SUFFIXES))}.",
        )
    listing = json.dumps([(f.path, f.size, f.modified_ns) for f in files]).encode()
    digest = hashlib.sha256(b"bytes:" + listing).hexdigest()[:12]
    folder = f"{name}-{digest}"
    url = f"{storage.rstrip('/')}/corpora/{folder}"
    num_tokens = sum(f.size + 1 for f in files)
    if read_manifest(open_store(url), where=url) is not None:
        files = ()
    return CorpusSource(
        name=folder, url=url, files=files, num_tokens=num_tokens, vocab_size=BYTES_VOCABULARY
    )


def _stdlib_files() -> tuple[SourceFile, ...]:
    root = Path(sysconfig.get_path("stdlib"))
    files = tuple(_text_files(root, suffixes={".py"}, excluded=_STDLIB_EXCLUDED))
    if not files:
        raise DataError(
            problem=f"The standard library of {sys.executable} has no sources under {root}.",
            way_out="Set data.source to a directory of text files.",
        )
    return files


def _text_files(root: Path, *, suffixes: set[str], excluded: set[str]) -> Iterable[SourceFile]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(s for s in subfolders if s not in excluded)
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix in suffixes and path.is_file():
                found = path.stat()
                yield SourceFile(path=str(path), size=found.st_size, modified_ns=found.st_mtime_ns)


def cut_pieces(files: Iterable[SourceFile], *, piece_bytes: int = _PIECE_BYTES) -> list[Piece]:
    """Group files, in order, into pieces of about ``piece_bytes``; every piece has a file."""
    pieces: list[Piece] = []
    group: list[SourceFile] = []
    group_bytes = 0
    for file in files:
        group.append(file)
        group_bytes += file.size + 1  # The end of the document counts, or empty files pile up.
        if group_bytes >= piece_bytes:
            pieces.append(Piece(index=len(pieces), files=tuple(group)))
            group, group_bytes = [], 0
    if group:
        pieces.append(Piece(index=len(pieces), files=tuple(group)))
    return pieces


def write_piece(piece: Piece, url: str) -> CorpusPart:
    """Read, tokenize and write one part; pure of order, so pieces may run anywhere.

    Raises:
        DataError: A file is gone or has changed since it was listed.
    """
    documents = []
    for file in piece.files:
        try:
            data = Path(file.path).read_bytes()
        except OSError as error:
            raise DataError(
                problem=f"{file.path} cannot be read: {error.strerror}.",
                way_out="Every node that prepares the corpus must see the same files.",
            ) from error
        if len(data) != file.size:
            raise DataError(
                problem=f"{file.path} has {len(data)} bytes; {file.size} when it was listed.",
                way_out="Start again once the source no longer changes.",
            )
        documents.append(np.frombuffer(data, np.uint8).astype("<u2"))
        documents.append(np.asarray([END_OF_DOCUMENT], "<u2"))
    tokens = np.concatenate(documents).tobytes()
    key = f"tokens-{piece.index:05d}.bin"
    open_store(url).put(key, tokens)
    return CorpusPart(
        key=key,
        num_tokens=len(tokens) // 2,
        num_documents=len(piece.files),
        crc32c=checksums.crc32c(tokens),
    )


def prepare(
    source: CorpusSource,
    map_pieces: Callable[[Callable[[Piece, str], CorpusPart], list[Piece], str], list[CorpusPart]],
) -> CorpusManifest:
    """Prepare the corpus if it is not there yet and return its manifest.

    Args:
        source: From ``find_source``.
        map_pieces: Calls the function on every piece and the url, and returns the parts in
            piece order; the seam between Ray Data and a plain loop.

    Raises:
        DataError: A file has changed, or there is neither a corpus nor anything to make it of.
    """
    store = open_store(source.url)
    existing = read_manifest(store, where=source.url)
    if existing is not None:
        return existing
    if not source.files:
        raise DataError(
            problem=f"The prepared corpus at {source.url} is no longer there.",
            way_out="Start again, so that it is prepared anew, or set data.source to another.",
        )
    parts = map_pieces(write_piece, cut_pieces(source.files), source.url)
    manifest = CorpusManifest(
        format=FORMAT,
        source=source.name,
        tokenizer="bytes",
        dtype="uint16",
        vocab_size=BYTES_VOCABULARY,
        num_tokens=sum(p.num_tokens for p in parts),
        num_documents=sum(p.num_documents for p in parts),
        parts=tuple(parts),
    )
    store.put(MANIFEST_KEY, manifest.to_json())
    return manifest


def map_in_process(
    function: Callable[[Piece, str], CorpusPart], pieces: list[Piece], url: str
) -> list[CorpusPart]:
    """Map over pieces in this process, one after another: for launchers without Ray."""
    return [function(piece, url) for piece in pieces]
