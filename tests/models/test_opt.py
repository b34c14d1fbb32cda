"""OPT's zeta goes where it may, and the hidden factor of its query is taken out."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import OPTConfig

from aespa_pl.models import family_of
from tests.models.examples import make_ids, make_model, observed
from tests.models.parts import OPT, config

ALL = {"attention_input", "attention_output", "mlp_input", "mlp_hidden"}


@pytest.mark.parametrize(
    ("options", "folding"),
    [
        ({}, ALL),
        ({"do_layer_norm_before": False}, {"attention_output", "mlp_hidden"}),
        ({"layer_norm_elementwise_affine": False}, {"attention_output", "mlp_hidden"}),
        ({"activation_function": "gelu"}, ALL - {"mlp_hidden"}),
        ({"enable_bias": False}, ALL),
    ],
)
def test_zeta_folds_only_where_it_is_exact(options: dict[str, Any], folding: set[str]) -> None:
    settings = config(OPTConfig, OPT, options)
    layout = family_of(settings).layout(settings)
    assert {group.name for group in layout.groups} == ALL
    assert {group.name for group in layout.groups if group.fold is not None} == folding


def test_positions_are_those_that_were_learned() -> None:
    settings = config(OPTConfig, OPT)
    assert family_of(settings).positions(settings) == 16


def test_observed_query_is_the_projections_output() -> None:
    """Transformers hands over a query that is already multiplied by 1 / sqrt(d_h)."""
    model, ids = make_model("opt"), make_ids()
    family = family_of(model.config)
    block = model.get_submodule(family.blocks_path)[0]
    outputs: dict[str, Tensor] = {}
    for name in ("q_proj", "k_proj"):
        block.get_submodule(f"self_attn.{name}").register_forward_hook(
            lambda _, x, y, name=name: outputs.__setitem__(name, y)
        )
    seen = observed(model, ids)
    for head in range(4):
        rows = slice(6 * head, 6 * head + 6)
        torch.testing.assert_close(seen.query[:, head], outputs["q_proj"][..., rows])
        torch.testing.assert_close(seen.key[:, head], outputs["k_proj"][..., rows])
    assert seen.rotation is None
    assert family.norm_weights(block) is None


def test_factor_of_the_query_is_undone_without_another_rounding() -> None:
    """The head size is 6: half precision has no exact 1 / sqrt(6)."""
    model, ids = make_model("opt", torch.bfloat16), make_ids()
    family = family_of(model.config)
    block = model.get_submodule(family.blocks_path)[0]
    outputs: list[Tensor] = []
    block.get_submodule("self_attn.q_proj").register_forward_hook(lambda _, x, y: outputs.append(y))
    seen = observed(model, ids)
    handed_over = (outputs[0] * 6**-0.5).unflatten(-1, (4, 6)).transpose(1, 2)
    assert seen.query.dtype == torch.float32
    torch.testing.assert_close(seen.query.double(), handed_over.double() * 6**0.5)
    assert seen.scaling == pytest.approx(6**-0.5)
