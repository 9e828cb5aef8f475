# SPDX-License-Identifier: Apache-2.0
"""Initial weights from the seed. Real: torch and transformers modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers
from torch import nn

from raydist.errors import ConfigError
from raydist.train.weights import initialize_weights


class _TwoLayers(nn.Module):
    def __init__(self, *, in_reverse: bool = False) -> None:
        super().__init__()
        names = ["first", "second"]
        for name in reversed(names) if in_reverse else names:
            self.add_module(name, nn.Linear(7, 5))
        self.norm = nn.LayerNorm(5)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def _weights(model: nn.Module, *, seed: int = 0) -> dict[str, torch.Tensor]:
    initialize_weights(model, seed=seed)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _are_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_weights_do_not_depend_on_the_global_random_state() -> None:
    torch.manual_seed(1)
    first = _weights(_TwoLayers())
    torch.manual_seed(2)
    torch.rand(100)
    assert _are_equal(_weights(_TwoLayers()), first)


def test_weights_leave_the_global_random_state_as_it_was() -> None:
    model = _TwoLayers()
    before = torch.get_rng_state()
    initialize_weights(model, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_do_not_depend_on_the_order_of_building() -> None:
    assert _are_equal(_weights(_TwoLayers(in_reverse=True)), _weights(_TwoLayers()))


def test_weights_do_not_depend_on_what_the_parameters_held() -> None:
    model = _TwoLayers()
    for p in model.parameters():
        nn.init.constant_(p, float("nan"))
    assert _are_equal(_weights(model), _weights(_TwoLayers()))


def test_weights_differ_between_seeds_and_between_modules_of_one_shape() -> None:
    zero, one = _weights(_TwoLayers()), _weights(_TwoLayers(), seed=1)
    assert not torch.equal(zero["first.weight"], one["first.weight"])
    assert not torch.equal(zero["first.weight"], zero["second.weight"])
    assert torch.equal(zero["norm.weight"], torch.ones(5))


@pytest.mark.parametrize("seed", [-1, 0, 2**31, 2**63, 2**70])
def test_weights_take_any_whole_number_as_seed(seed: int) -> None:
    assert _are_equal(_weights(_TwoLayers(), seed=seed), _weights(_TwoLayers(), seed=seed))


def test_weights_tied_stay_tied_and_equal_for_equal_seeds() -> None:
    model, other = _Tied(), _Tied()
    assert _are_equal(_weights(model), _weights(other))
    assert model.head.weight is model.embedding.weight


def test_weights_without_a_rule_are_refused_naming_the_module() -> None:
    model = nn.Sequential(nn.Linear(3, 3), _Scale())
    with pytest.raises(ConfigError, match=r"Module '1' \(_Scale\) .* no reset_parameters\(\)"):
        initialize_weights(model, seed=0)


def test_weights_of_a_module_without_parameters_need_no_rule() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Dropout(0.1))
    assert set(_weights(model)) == {"0.weight", "0.bias"}


def test_weights_are_gathered_one_module_at_a_time() -> None:
    held: list[list[tuple[int, ...]]] = []
    is_whole = False

    @contextmanager
    def gather(parameters: list[nn.Parameter]) -> Iterator[None]:
        nonlocal is_whole
        assert not is_whole
        is_whole = True
        held.append([tuple(p.shape) for p in parameters])
        yield
        is_whole = False

    model = _TwoLayers()
    initialize_weights(model, seed=0, gather=gather)
    assert held == [[(5, 7), (5,)], [(5, 7), (5,)], [(5,), (5,)]]
    assert _are_equal(dict(model.named_parameters()), _weights(_TwoLayers()))


def _llama(*, tie: bool = False) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=272,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=tie,
            use_cache=False,
        )
    )


def _qwen2() -> nn.Module:
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=272,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            use_cache=False,
        )
    )


def test_weights_of_llama_follow_its_own_rule() -> None:
    model = _llama()
    for p in model.parameters():
        nn.init.constant_(p, float("nan"))  # transformers' own initialization is not relied on
    weights = _weights(model)
    norms = [name for name in weights if "norm" in name]
    assert len(norms) == 5
    for name, weight in weights.items():
        if name in norms:
            assert torch.equal(weight, torch.ones(64))
        else:
            assert 0.018 < weight.std().item() < 0.022, name
            assert abs(weight.mean().item()) < 0.002, name
    assert len({weight.sum().item() for name, weight in weights.items() if name not in norms}) == 16


def test_weights_of_llama_are_equal_for_equal_seeds_only() -> None:
    torch.manual_seed(5)
    first = _weights(_llama())
    torch.manual_seed(6)
    assert _are_equal(_weights(_llama()), first)
    other = _weights(_llama(), seed=1)
    assert not torch.equal(other["lm_head.weight"], first["lm_head.weight"])


def test_weights_of_llama_that_transformers_calls_initialized_are_made_all_the_same() -> None:
    model = _llama()
    for tensor in (*model.modules(), *model.parameters()):
        tensor._is_hf_initialized = True  # type: ignore[assignment]
    assert _are_equal(_weights(model), _weights(_llama()))


def test_weights_of_llama_leave_its_rotary_buffers_intact() -> None:
    model = _llama()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert any("inv_freq" in name for name in before)
    initialize_weights(model, seed=0)
    after = dict(model.named_buffers())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_weights_of_llama_tied_stay_tied() -> None:
    model = _llama(tie=True)
    weights = _weights(model)
    assert "lm_head.weight" not in weights
    head = model.get_output_embeddings().weight  # type: ignore[operator,union-attr]
    assert head is model.get_input_embeddings().weight  # type: ignore[operator,union-attr]
    assert 0.018 < head.std().item() < 0.022
    assert _are_equal(_weights(_llama(tie=True)), weights)


def test_weights_of_qwen2_have_zero_biases() -> None:
    weights = _weights(_qwen2())
    biases = [weight for name, weight in weights.items() if name.endswith("bias")]
    assert len(biases) == 6
    assert all(not bias.any() for bias in biases)
    assert all(torch.isfinite(weight).all() for weight in weights.values())
