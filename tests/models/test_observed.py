"""What is observed of an attention gives the library's probabilities and changes nothing."""

import math

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from aespa_pl.models import family_of
from aespa_pl.models.observed import Attention
from tests.models.examples import EXAMPLES, LENGTH, SINGLE, WINDOW, make_ids, make_model

LATENT = ("glm4-flash", "deepseek-v2", "deepseek-v3")
"""Models whose attention is not observed."""
observed_example = pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in LATENT])


def observe(model: PreTrainedModel, ids: Tensor) -> list[Attention]:
    """Return what was seen in each block that has attention."""
    family = family_of(model.config)
    hidden, arguments = family.embed(model, ids)
    seen: list[Attention] = []
    for block, layout in zip(
        model.get_submodule(family.blocks_path), family.layouts(model.config), strict=True
    ):
        if layout.attended_group is None:
            hidden = family.run_block(block, hidden, arguments)
            continue
        with family.observe_attention(model, block, seen.append):
            family.run_block(block, hidden, family.arguments(model, hidden))
        hidden = family.run_block(block, hidden, arguments)
    return seen


def attends(block: nn.Module) -> bool:
    return not any(getattr(block, other, None) is not None for other in ("linear_attn", "conv", "mamba"))


def windows(model: PreTrainedModel) -> list[int]:
    """Return how far back each block with attention sees."""
    kinds = getattr(model.config, "layer_types", None)
    if kinds is None:
        everywhere = getattr(model.config, "sliding_window", None) or LENGTH
        return [everywhere] * model.config.num_hidden_layers
    return [
        WINDOW if kind == "sliding_attention" else LENGTH
        for kind in kinds
        if kind.endswith("attention") and "linear" not in kind
    ]


def explicit_probabilities(
    query: Tensor,
    key: Tensor,
    window: int,
    slope: float = 0.0,
    scale: float | None = None,
    cap: float | None = None,
    sink: float | None = None,
) -> Tensor:
    """Return the probabilities ``[L, L]`` of one head, entry by entry."""
    length, size = query.shape
    scores = torch.full((length, length), -torch.inf, dtype=torch.float64)
    for i in range(length):
        for j in range(max(0, i - window + 1), i + 1):
            score = query[i] @ key[j] * (scale or size**-0.5)
            scores[i, j] = (score if cap is None else cap * (score / cap).tanh()) - slope * (i - j)
    if sink is None:
        return scores.softmax(-1)
    return scores.exp() / (scores.exp().sum(-1, keepdim=True) + math.exp(sink))


@observed_example
def test_observed_probabilities_are_the_librarys(name: str) -> None:
    model, ids = make_model(name), make_ids()
    seen = observe(model, ids)
    model.set_attn_implementation("eager")
    expected = model(ids, use_cache=False, output_attentions=True).attentions
    assert len(seen) == len(expected) == len(windows(model))
    for attention, probabilities in zip(seen, expected, strict=True):
        torch.testing.assert_close(attention.probabilities(), probabilities, **SINGLE, check_dtype=False)


@observed_example
def test_probabilities_follow_from_the_observed_queries_and_keys(name: str) -> None:
    """The queries are free of 1 / sqrt(d_h); windows, ALiBi and the cap are in the probabilities."""
    model, ids = make_model(name), make_ids(1)
    family = family_of(model.config)
    scale = 0.7 if name.startswith("granite") else 5**-0.5 if name.startswith("gemma") else None
    scale = 1.0 if name.startswith("gemma4") else scale
    cap = model.config.attn_logit_softcapping if name == "gemma2" else None
    blocks = [b for b in enumerate(model.get_submodule(family.blocks_path)) if attends(b[1])]
    for (index, block), attention, window in zip(blocks, observe(model, ids), windows(model), strict=True):
        layout = family.layout(model.config, index)
        shared = layout.heads // layout.key_value_heads
        assert attention.query.shape == (1, layout.heads, LENGTH, layout.head_dim)
        assert attention.key.shape == (1, layout.key_value_heads, LENGTH, layout.head_dim)
        for head in range(layout.heads):
            slope = 2.0 ** (-2 * (head + 1)) if name.startswith("bloom") else 0.0
            expected = explicit_probabilities(
                attention.query[0, head],
                attention.key[0, head // shared],
                window,
                slope,
                scale,
                cap,
                block.self_attn.sinks[head].item() if name == "gpt-oss" else None,
            )
            torch.testing.assert_close(attention.probabilities()[0, head], expected, **SINGLE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@observed_example
def test_observed_block_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """The walk counts on it: a replay, which observes nothing, gives the same hidden states."""
    model, ids = make_model(name, dtype), make_ids()
    family = family_of(model.config)
    hidden, arguments = family.embed(model, ids)
    for block in model.get_submodule(family.blocks_path):
        plain = family.run_block(block, hidden, arguments)
        if not attends(block):
            continue
        seen: list[Attention] = []
        with family.observe_attention(model, block, seen.append):
            observed = family.run_block(block, hidden, family.arguments(model, hidden))
        assert len(seen) == 1
        assert observed.dtype == dtype
        assert torch.equal(observed, plain)
        hidden = plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["opt", "bloom", "llama-grouped", "mistral-window", "qwen3-mixed"])
def test_one_token_is_observed(name: str, dtype: torch.dtype) -> None:
    model, ids = make_model(name, dtype), make_ids()[:, :1]
    family = family_of(model.config)
    hidden, arguments = family.embed(model, ids)
    plain = family.run_block(model.get_submodule(family.blocks_path)[0], hidden, arguments)
    seen: list[Attention] = []
    block = model.get_submodule(family.blocks_path)[0]
    with family.observe_attention(model, block, seen.append):
        observed = family.run_block(block, hidden, family.arguments(model, hidden))
    assert torch.equal(observed, plain)
    assert torch.equal(seen[0].probabilities(), torch.ones(2, 4, 1, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-grouped", "qwen3-mixed"])
def test_probabilities_are_computed_in_float32_from_queries_in_half_precision(
    name: str, dtype: torch.dtype
) -> None:
    model, ids = make_model(name, dtype), make_ids(1)
    for attention, window in zip(observe(model, ids), windows(model), strict=True):
        assert attention.query.dtype == attention.key.dtype == dtype
        query, key = attention.query[0].double(), attention.key[0].double()
        for head in range(4):
            expected = explicit_probabilities(query[head], key[head // 2], window)
            found = attention.probabilities()[0, head].double()
            torch.testing.assert_close(found, expected, **SINGLE)


@pytest.mark.parametrize("name", ["opt", "bloom", "qwen3-mixed"])
def test_observation_ends_with_its_context(name: str) -> None:
    model, ids = make_model(name), make_ids()
    family = family_of(model.config)
    block = model.get_submodule(family.blocks_path)[0]
    before = model.config._attn_implementation
    seen: list[Attention] = []

    def fail() -> None:
        with family.observe_attention(model, block, seen.append):
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert model.config._attn_implementation == before
    hooks = [module._forward_pre_hooks or module._forward_hooks for module in block.modules()]
    assert not any(hooks)
    hidden, arguments = family.embed(model, ids)
    family.run_block(block, hidden, arguments)
    assert not seen


@pytest.mark.parametrize("name", ["opt", "bloom", "llama"])
def test_observation_sees_its_own_block_and_model_only(name: str) -> None:
    model, other, ids = make_model(name), make_model(name), make_ids()
    family = family_of(model.config)
    first, second = list(model.get_submodule(family.blocks_path))[:2]
    seen: list[Attention] = []
    with family.observe_attention(model, first, seen.append):
        hidden, arguments = family.embed(model, ids)
        family.run_block(second, hidden, arguments)
        other(ids, use_cache=False)
        assert not seen
        family.run_block(first, hidden, arguments)
    assert len(seen) == 1
