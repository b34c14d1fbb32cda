"""BLOOM's fused matrix is divided, zeta is folded where it may go, and other parts are refused."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig

from aespa_pl.errors import UserError
from aespa_pl.models import family_of
from aespa_pl.models.weights import projection_weight
from tests.models.examples import make_ids, make_model, observed
from tests.models.parts import BLOOM, config


@pytest.mark.parametrize(
    ("options", "folding"),
    [
        ({}, {"attention_input", "attention_output", "mlp_input"}),
        ({"apply_residual_connection_post_layernorm": True}, {"attention_output"}),
    ],
)
def test_zeta_folds_only_where_it_is_exact(options: dict[str, Any], folding: set[str]) -> None:
    settings = config(BloomConfig, BLOOM, options)
    groups = family_of(settings).layout(settings).groups
    assert {group.name for group in groups if group.fold is not None} == folding


def test_alibi_has_no_limit_of_positions() -> None:
    settings = config(BloomConfig, BLOOM)
    assert family_of(settings).positions(settings) is None


def test_sums_in_slices_are_refused() -> None:
    settings = config(BloomConfig, BLOOM, {"pretraining_tp": 2, "slow_but_exact": True})
    with pytest.raises(UserError, match="slow_but_exact true with pretraining_tp 2 in config"):
        family_of(settings)
    family_of(config(BloomConfig, BLOOM, {"pretraining_tp": 2}))


def test_parts_of_the_fused_matrix_are_query_key_and_value() -> None:
    model, ids = make_model("bloom"), make_ids()
    family = family_of(model.config)
    layout = family.layout(model.config)
    block: Any = model.get_submodule(family.blocks_path)[0]
    attention = block.self_attention
    inputs: list[Tensor] = []
    handle = attention.query_key_value.register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    seen = observed(model, ids)
    handle.remove()
    fused = attention._reshape(attention.query_key_value(inputs[0]))  # the library's own split
    for part, (projection, expected) in enumerate(zip(layout.groups[0].projections, fused, strict=True)):
        bias = attention.query_key_value.bias.view(4, 3, 6)[:, part].flatten()
        output = inputs[0] @ projection_weight(block, layout, projection).T + bias
        for head in range(4):
            torch.testing.assert_close(output[..., 6 * head : 6 * head + 6], expected[:, head])
    torch.testing.assert_close(seen.query, fused[0])
    torch.testing.assert_close(seen.key, fused[1])
