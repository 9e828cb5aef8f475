# SPDX-License-Identifier: Apache-2.0
"""Which stored tensor each of the model's begins from, and what is refused. Pure; no fakes."""

from __future__ import annotations

import pytest
import torch
from huggingface_directory import SHAPES, files, single, specs, tensors

from raydist.checkpoint.huggingface_match import match_tensors
from raydist.checkpoint.ranges import TensorSpec
from raydist.errors import ConfigError

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _without(*names: str) -> dict[str, tuple[int, ...]]:
    return {n: s for n, s in SHAPES.items() if n not in names}


def test_match_same_names_are_their_own_sources() -> None:
    match = match_tensors(files(single(tensors())), specs())
    assert {k: s.name for k, s in match.sources.items()} == {f"master/{n}": n for n in SHAPES}
    assert match.notes == ()


def test_match_names_without_the_models_prefix_are_found() -> None:
    bare = {n.removeprefix("model."): t for n, t in tensors().items()}
    match = match_tensors(files(single(bare)), specs())
    assert match.sources[f"master/{EMBED}"].name == "embed_tokens.weight"
    assert len(match.sources) == len(SHAPES)


def test_match_names_with_a_prefix_that_the_model_lacks_are_found() -> None:
    bare = {n.removeprefix("model."): s for n, s in SHAPES.items()}
    match = match_tensors(files(single(tensors())), specs(bare))
    assert match.sources["master/norm.weight"].name == "model.norm.weight"
    assert len(match.sources) == len(SHAPES)


@pytest.mark.parametrize("said", [{}, {"tie_word_embeddings": True}])
def test_match_missing_output_begins_as_the_embedding_and_is_said(said) -> None:
    match = match_tensors(files(single(tensors(_without(HEAD)), **said)), specs())
    assert match.sources[f"master/{HEAD}"].name == EMBED
    assert match.notes == (f"{HEAD} is not there: it begins as a copy of {EMBED}",)


def test_match_missing_output_of_untied_weights_is_refused() -> None:
    there = files(single(tensors(_without(HEAD)), tie_word_embeddings=False))
    with pytest.raises(ConfigError, match=f"1 missing there: {HEAD}"):
        match_tensors(there, specs())


def test_match_tied_model_leaves_a_stored_output_out() -> None:
    there = files(single(tensors(), tie_word_embeddings=True))
    match = match_tensors(there, specs(_without(HEAD)))
    assert f"master/{HEAD}" not in match.sources


def test_match_tied_model_refuses_untied_weights() -> None:
    there = files(single(tensors(), tie_word_embeddings=False))
    with pytest.raises(ConfigError, match=r"not tied; here model.tie_embeddings=True"):
        match_tensors(there, specs(_without(HEAD)))


def test_match_everything_wrong_is_said_at_once_the_first_few_by_name() -> None:
    there = {f"model.layers.{n}.extra.weight": torch.ones(1) for n in range(6)} | {
        EMBED: torch.ones(11, 5),
        "model.norm.weight": torch.ones(6, dtype=torch.int64),
    }
    with pytest.raises(ConfigError) as caught:
        match_tensors(files(single(there)), specs(_without(HEAD)))
    text = str(caught.value)
    assert "2 missing there: model.layers.0.mlp.up_proj.weight; model.layers.0.self_attn" in text
    assert "6 there and not of this model: " in text
    assert "; and 2 more" in text
    assert f"{EMBED} is [11, 6], there [11, 5]" in text
    assert "model.norm.weight is I64 there" in text


def test_match_only_vocabularies_are_resized() -> None:
    wider = {**SHAPES, "model.layers.0.mlp.up_proj.weight": (9, 6)}
    with pytest.raises(ConfigError, match=r"up_proj.weight is \[9, 6\], there \[7, 6\]"):
        match_tensors(files(single(tensors())), specs(wider))


@pytest.mark.parametrize(
    ("rows", "note"),
    [
        (14, "11 rows are there, the other 3 begin from the seed"),
        (9, "the first 9 of 11 rows are taken"),
    ],
)
def test_match_vocabulary_of_other_size_is_resized_and_said(rows: int, note: str) -> None:
    resized = {**SHAPES, EMBED: (rows, 6), HEAD: (rows, 6)}
    match = match_tensors(files(single(tensors())), specs(resized))
    assert match.notes == (f"{EMBED}: {note}", f"{HEAD}: {note}")


def test_match_saved_rotary_frequencies_are_left_out() -> None:
    given = {**tensors(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    assert len(match_tensors(files(single(given)), specs()).sources) == len(SHAPES)


def test_match_buffer_is_taken_where_it_is_there_and_left_where_not() -> None:
    mine = TensorSpec(key="buffer/scale", shape=(5,), dtype="F32")
    assert "buffer/scale" not in match_tensors(files(single(tensors())), [*specs(), mine]).sources
    given = {**tensors(), "scale": torch.ones(5)}
    assert "buffer/scale" in match_tensors(files(single(given)), [*specs(), mine]).sources
