# SPDX-License-Identifier: Apache-2.0
"""Which tensor of a Hugging Face directory each tensor of the model begins from. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from raydist.checkpoint.float_bits import FLOATS
from raydist.checkpoint.huggingface_files import StoredTensor, WeightFiles
from raydist.checkpoint.ranges import TensorSpec
from raydist.errors import ConfigError

_PREFIX = "model."
_EMBEDDING = "embed_tokens.weight"
_OUTPUT = "lm_head.weight"
_IGNORED = ("rotary_emb.inv_freq",)
"""Ends of names that older versions of transformers saved although they are computed."""
_NUM_SHOWN = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """Sources of the model's tensors.

    Fields:
        sources: By tensor key; a buffer that is not there stays as the model made it.
        notes: What a reader should know: vocabulary rows added or cut, tied weights.
    """

    sources: dict[str, StoredTensor]
    notes: tuple[str, ...] = ()


def match_tensors(files: WeightFiles, specs: Iterable[TensorSpec]) -> Match:
    """Find a source for every weight of the model.

    Names may have the prefix `model.` or lack it. A missing lm_head is the embedding unless
    config.json denies it. Embeddings may have more or fewer rows than the model's: rows that are
    in both are taken, the model's others stay as the seed made them.

    Args:
        files: The directory.
        specs: The model's `master/...` and `buffer/...` tensors, in full.

    Raises:
        ConfigError: Weights are missing, unexpected, of another shape, or of a dtype that is no
            floating-point format; all of it in one message.
    """
    missing: list[str] = []
    misfits: list[str] = []
    notes: list[str] = []
    sources: dict[str, StoredTensor] = {}
    for spec in specs:
        kind, _, name = spec.key.partition("/")
        source = _find(files, name)
        if source is None and name == _OUTPUT and files.is_tied is not False:
            source = _find(files, _PREFIX + _EMBEDDING)
            if source is not None:
                notes.append(f"{_OUTPUT} is not there: it begins as a copy of {source.name}")
        if source is None:
            if kind == "master":
                missing.append(name)
            continue
        sources[spec.key] = source
        if source.dtype not in FLOATS and kind == "master":
            misfits.append(f"{name} is {source.dtype} there, which is no format of weights")
        elif source.shape != spec.shape:
            note = _resized(name, source.shape, spec.shape)
            (notes if note else misfits).append(
                note or f"{name} is {list(spec.shape)}, there {list(source.shape)}"
            )
    used = {source.name for source in sources.values()}
    has_output = any(key.endswith(f"/{_OUTPUT}") for key in sources)
    ignored = _IGNORED + (() if has_output else (_OUTPUT,))
    unexpected = [n for n in files.tensors if n not in used and not n.endswith(ignored)]
    if not has_output and files.is_tied is False and _find(files, _OUTPUT):
        unexpected.append(f"{_OUTPUT} (config.json: not tied; here model.tie_embeddings=True)")
    _refuse(files.where, missing=missing, unexpected=unexpected, misfits=misfits)
    return Match(sources=sources, notes=tuple(notes))


def _find(files: WeightFiles, name: str) -> StoredTensor | None:
    for candidate in (name, _PREFIX + name, name.removeprefix(_PREFIX)):
        if candidate in files.tensors:
            return files.tensors[candidate]
    return None


def _resized(name: str, there: tuple[int, ...], here: tuple[int, ...]) -> str:
    """Say which rows of an embedding are added or cut; empty when it is no such case."""
    if not name.endswith((_EMBEDDING, _OUTPUT)) or len(there) != 2 or there[1:] != here[1:]:
        return ""
    rows, wanted = there[0], here[0]
    if wanted > rows:
        return f"{name}: {rows} rows are there, the other {wanted - rows} begin from the seed"
    return f"{name}: the first {wanted} of {rows} rows are taken"


def _refuse(where: str, *, missing: list[str], unexpected: list[str], misfits: list[str]) -> None:
    """Stop when anything was found.

    Raises:
        ConfigError: All of it, the first few of each kind by name.
    """
    lines = [
        f"\n    {len(found)} {what}: {'; '.join(found[:_NUM_SHOWN])}"
        + (f"; and {len(found) - _NUM_SHOWN} more" if len(found) > _NUM_SHOWN else "")
        for what, found in (
            ("missing there", missing),
            ("there and not of this model", unexpected),
            ("that do not fit", misfits),
        )
        if found
    ]
    if lines:
        raise ConfigError(
            problem=f"The weights at {where} are not of this model:{''.join(lines)}",
            way_out="Set the model section to the shape of those weights, or model.weights to "
            "weights of this model.",
        )
