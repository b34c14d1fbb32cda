"""Folding and writing of weights change nothing else."""

import pytest
import torch
from torch import Tensor

from aespa_pl.models import family_of
from aespa_pl.models.family import BlockLayout
from aespa_pl.models.weights import fold, projection_weight, set_projection_weight
from tests.models.examples import every_example, make_ids, make_model, make_ours


def random_zeta(layout: BlockLayout, block: torch.nn.Module) -> dict[str, Tensor]:
    """Return zeta between 0.5 and 2 for each group that folds."""
    return {
        group.name: torch.exp2(torch.rand(d_in, dtype=torch.float64) * 2 - 1)
        for group in layout.groups
        if group.fold is not None
        for d_in in [projection_weight(block, layout, group.projections[0]).shape[1]]
    }


@every_example
def test_folding_leaves_logits_unchanged(name: str) -> None:
    model, ids = make_ours(name), make_ids()
    family = family_of(model.config)
    before = model(ids, use_cache=False).logits
    for index, block in enumerate(model.get_submodule(family.blocks_path)):
        layout = family.layout(model.config, index)
        for group, zeta in random_zeta(layout, block).items():  # one group after the other
            fold(block, layout, {group: zeta})
        fold(block, layout, random_zeta(layout, block))  # and all at once
    # RMSNorm of the library is float32 in a float64 model; everything else agrees to 1e-13.
    tolerance = 1e-10 if name.startswith(("opt", "bloom")) else 1e-5
    if name.startswith("bloom"):
        tolerance = 1e-6  # its softmax is float32
    if "linear_attention" in getattr(model.config, "layer_types", ()):
        tolerance = 1e-3  # so is its linear attention, which norms amplify
    if name == "gemma4-small":
        tolerance = 1e-4  # it has a norm more, behind a small output
    torch.testing.assert_close(model(ids, use_cache=False).logits, before, rtol=tolerance, atol=tolerance)


@every_example
def test_folding_divides_columns_and_multiplies_rows_of_the_target(name: str) -> None:
    model = make_ours(name)
    family = family_of(model.config)
    layout = family.layout(model.config)
    block = model.get_submodule(family.blocks_path)[0]
    before = {p.name: projection_weight(block, layout, p).clone() for p in layout.projections}
    zeta = random_zeta(layout, block)
    fold(block, layout, zeta)
    rows = {
        getattr(group.fold, "projection", ""): zeta[group.name]
        for group in layout.groups
        if group.fold is not None
    }
    for group in layout.groups:
        for projection in group.projections:
            expected = before[projection.name] / zeta.get(group.name, torch.ones(()))
            if projection.name in rows:
                expected = rows[projection.name][:, None] * expected
            torch.testing.assert_close(projection_weight(block, layout, projection), expected)


@every_example
def test_every_projection_can_be_written_back(name: str) -> None:
    model = make_ours(name)
    family = family_of(model.config)
    layout = family.layout(model.config)
    block = model.get_submodule(family.blocks_path)[0]
    new = {p.name: torch.randn_like(projection_weight(block, layout, p)) for p in layout.projections}
    for projection in layout.projections:
        set_projection_weight(block, layout, projection, new[projection.name])
    for projection in layout.projections:
        assert torch.equal(projection_weight(block, layout, projection), new[projection.name])


def test_folding_in_half_precision_rounds_once() -> None:
    """zeta stays float32: as bfloat16 it would bring an error of its own."""
    model = make_model("llama", torch.bfloat16)
    family = family_of(model.config)
    layout = family.layout(model.config)
    block = model.get_submodule(family.blocks_path)[0]
    weight = projection_weight(block, layout, layout.projections[0])
    zeta = torch.rand(24) + 0.5
    expected = (weight.float() / zeta).bfloat16()
    fold(block, layout, {"attention_input": zeta})
    assert torch.equal(weight, expected)


def test_zeta_must_be_positive_and_have_somewhere_to_go() -> None:
    model = make_model("llama-grouped")
    family = family_of(model.config)
    layout = family.layout(model.config)
    block = model.get_submodule(family.blocks_path)[0]
    for wrong in (0, -1):
        zeta = torch.ones(24)
        zeta[5] = wrong
        with pytest.raises(ValueError, match="zeta of mlp_input must be positive"):
            fold(block, layout, {"mlp_input": zeta})
    with pytest.raises(ValueError, match="zeta of attention_output has nowhere to go"):
        fold(block, layout, {"attention_output": torch.ones(24)})
