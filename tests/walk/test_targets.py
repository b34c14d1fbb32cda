"""Targets of a block's tuning."""

import pytest
import torch

from aespa_pl.block.grids import fit_grids
from aespa_pl.distributed.processes import ALONE
from aespa_pl.models import family_of
from aespa_pl.models.weights import fold, set_projection_weight
from aespa_pl.walk.block_tuner import folded_target
from tests.block.blocks import FEW, begin, make_statistics
from tests.models.examples import LENGTH, make_model


@pytest.mark.parametrize("name", ["opt", "bloom", "llama-grouped"])
def test_targets_of_a_tuning_are_the_original_weights_with_zeta_folded(name: str) -> None:
    """Folding changes no output: with the targets as weights the folded block is the original one."""
    torch.manual_seed(0)
    model = make_model(name, torch.float32)
    family = family_of(model.config)
    layout = family.layout(model.config)
    block = model.get_submodule(family.blocks_path)[0]
    hidden = torch.randn(2, LENGTH, model.config.hidden_size)
    arguments = family.arguments(model, hidden)
    expected = family.run_block(block, hidden, arguments)
    quantized = begin(block, layout, make_statistics(block, layout))
    fit_grids(quantized, FEW, ALONE)
    assert any(bool((p.row_factor != 1).any()) for p in quantized.projections.values())
    targets = {n: folded_target(p) for n, p in quantized.projections.items()}
    fold(block, layout, quantized.zetas())
    for p in layout.projections:
        set_projection_weight(block, layout, p, targets[p.name])
    torch.testing.assert_close(family.run_block(block, hidden, arguments), expected, rtol=1e-4, atol=1e-5)
