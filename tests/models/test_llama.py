"""LLaMA-type models are observed with rotation, norms on heads and windows, folded, or refused."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, Qwen3Config

from aespa_pl.errors import UserError
from aespa_pl.models import family_of
from tests.models.examples import EXAMPLES, LENGTH, WINDOW, make_ids, make_model, observed
from tests.models.parts import LLAMA, config


@pytest.mark.parametrize(
    ("name", "folds_values"), [("llama", True), ("llama-grouped", False), ("qwen3", False)]
)
def test_zeta_folds_into_values_only_without_shared_heads(name: str, folds_values: bool) -> None:
    settings = EXAMPLES[name]()
    groups = {group.name: group.fold for group in family_of(settings).layout(settings).groups}
    assert (groups.pop("attention_output") is not None) == folds_values
    assert None not in groups.values()
    assert set(groups) == {"attention_input", "mlp_input", "mlp_hidden"}


@pytest.mark.parametrize(("name", "size"), [("qwen2", 6), ("qwen3", 8), ("mistral", 8)])
def test_head_size_is_the_configurations(name: str, size: int) -> None:
    settings = EXAMPLES[name]()
    assert family_of(settings).layout(settings).head_dim == size


def test_positions_are_those_of_rope() -> None:
    settings = EXAMPLES["llama"]()
    assert family_of(settings).positions(settings) == 16


def rotate(heads: Tensor, base: float = 10000.0) -> Tensor:
    """Turn each pair ``(i, i + d_h / 2)`` of ``[L, d_h]`` by ``t base^(-2 i / d_h)``."""
    length, size = heads.shape
    turned = torch.zeros_like(heads)
    for t in range(length):
        for i in range(size // 2):
            angle = torch.tensor(t * base ** (-2 * i / size), dtype=torch.float64)
            a, b = heads[t, i], heads[t, i + size // 2]
            turned[t, i] = a * angle.cos() - b * angle.sin()
            turned[t, i + size // 2] = b * angle.cos() + a * angle.sin()
    return turned


@pytest.mark.parametrize("name", ["llama", "llama-grouped", "mistral", "qwen2", "qwen3"])
def test_observed_queries_and_keys_are_rotated(name: str) -> None:
    model, ids = make_model(name), make_ids(1)
    family = family_of(model.config)
    attention: Any = model.get_submodule(family.blocks_path)[0].self_attn
    before: dict[str, Tensor] = {}
    for part in ("q", "k"):
        last = f"{part}_norm" if name == "qwen3" else f"{part}_proj"
        getattr(attention, last).register_forward_hook(
            lambda _, x, y, part=part: before.__setitem__(part, y[0].view(LENGTH, -1))
        )
    seen, size = observed(model, ids), family.layout(model.config).head_dim
    for part, heads in (("q", seen.query[0]), ("k", seen.key[0])):
        for head, rotated in enumerate(heads):
            expected = rotate(before[part][:, size * head : size * (head + 1)])
            # the library has cos and sin in float32
            torch.testing.assert_close(rotated, expected, rtol=1e-5, atol=1e-5)


def test_scale_of_head_norms_is_observed() -> None:
    model, ids = make_model("qwen3"), make_ids()
    family = family_of(model.config)
    block: Any = model.get_submodule(family.blocks_path)[1]
    attention = block.self_attn
    attention.q_norm.variance_epsilon, attention.k_norm.variance_epsilon = 0.3, 0.7
    outputs: dict[str, Tensor] = {}
    for part in ("q", "k"):
        getattr(attention, f"{part}_proj").register_forward_hook(
            lambda _, x, y, part=part: outputs.__setitem__(part, y)
        )
    seen = observed(model, ids, 1)
    for part, heads, epsilon, scale in (
        ("q", 4, 0.3, seen.query_inverse_square),
        ("k", 2, 0.7, seen.key_inverse_square),
    ):
        assert scale is not None
        assert scale.shape == (2, heads, LENGTH)
        for head in range(heads):
            x = outputs[part][..., 8 * head : 8 * (head + 1)]
            expected = 1 / (x.pow(2).sum(-1) / 8 + epsilon)
            torch.testing.assert_close(scale[:, head], expected, rtol=1e-5, atol=1e-5, check_dtype=False)
    weights = family.norm_weights(block)
    assert weights is not None
    assert torch.equal(weights[0], attention.q_norm.weight[None])
    assert torch.equal(weights[1], attention.k_norm.weight[None])


def test_window_changes_the_logits() -> None:
    """Otherwise the tests of windows would show nothing."""
    model, ids = make_model("mistral-window"), make_ids()
    narrow = model(ids, use_cache=False).logits
    model.config.sliding_window = None
    assert not torch.allclose(model(ids, use_cache=False).logits, narrow, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            lambda: config(Qwen3Config, LLAMA, {"layer_types": ["chunked_attention"] * 3}),
            "layer_types chunked_attention in config.json is not supported: expected full_",
        ),
        (
            lambda: config(
                MistralConfig,
                LLAMA,
                {"sliding_window": WINDOW, "layer_types": ["full_attention"] + ["sliding_attention"] * 2},
            ),
            "transformers runs sliding_attention in every block of a mistral, got full_attention, "
            "sliding_attention: correct layer_types or model_type",
        ),
        (
            lambda: config(LlamaConfig, LLAMA, {"layer_types": ["sliding_attention"] * 3}),
            "transformers runs full_attention in every block of a llama, got sliding_attention",
        ),
    ],
)
def test_unknown_attention_is_refused_with_the_field(settings: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        family_of(settings())
