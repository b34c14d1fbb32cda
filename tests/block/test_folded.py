"""What leaves the rounding is exported exactly, with zeta folded into its neighbours."""

from dataclasses import replace

import pytest
import torch

from aespa_pl.models import family_of
from aespa_pl.models.weights import fold, set_projection_weight
from aespa_pl.settings import GridSettings
from tests.block.blocks import FEW, begin, make_block, make_statistics, next_zeta, updated
from tests.models.examples import EXAMPLES, every_example, make_ids, make_ours


@pytest.mark.parametrize(
    ("name", "group_size"), [*((name, None) for name in EXAMPLES), ("llama", 4), ("bloom", 4)]
)
def test_export_is_the_folded_dequantized_weight(name: str, group_size: int | None) -> None:
    settings = replace(FEW, group_size=group_size)
    problem = updated(make_block(name, settings), settings)
    prepared = problem.projections
    for p in prepared.values():
        size = group_size or p.weight.shape[-1]
        scale, zero = (
            value.double().repeat_interleave(size, -1) for value in (p.grid.scale, p.grid.zero_point)
        )
        unfolded = scale * p.grid.zeta.double() * (p.integers.double() - zero)
        rows = next_zeta(problem.layout, prepared, p.projection.name)
        folded = rows * unfolded / p.grid.zeta.double()
        exported = p.folded_grid.scale.double().repeat_interleave(size, -1) * (p.integers - zero)
        torch.testing.assert_close(exported, folded, rtol=3e-7, atol=0)


@every_example
def test_exported_model_gives_the_logits_of_the_dequantized_one(name: str) -> None:
    """And the model whose real-valued weights are folded those of the original."""
    plain, exported, folded = (make_ours(name) for _ in range(3))
    exported.load_state_dict(plain.state_dict())
    folded.load_state_dict(plain.state_dict())
    ids, original = make_ids(), plain.state_dict()["lm_head.weight"].clone()
    family = family_of(plain.config)
    before = plain(ids, use_cache=False).logits
    path = family.blocks_path
    blocks = (model.get_submodule(path) for model in (plain, exported, folded))
    for index, (ours, theirs, real) in enumerate(zip(*blocks, strict=True)):
        layout = family.layout(plain.config, index)
        problem = begin(ours, layout, make_statistics(ours, layout))
        settings = replace(FEW, bits=3, grid=GridSettings(max_rounds=1))
        prepared = updated(problem, settings).projections
        zetas = problem.zetas()
        fold(real, layout, zetas)
        fold(theirs, layout, zetas)
        for p in prepared.values():
            zero = p.grid.zero_point.double()
            scale = p.grid.scale.double() * p.grid.zeta.double()
            set_projection_weight(ours, layout, p.projection, scale * (p.integers - zero))
            weight = p.folded_grid.scale.double() * (p.integers - zero)
            set_projection_weight(theirs, layout, p.projection, weight)
    assert torch.equal(plain.state_dict()["lm_head.weight"], original)
    after = plain(ids, use_cache=False).logits
    assert float((after - before).abs().max()) > 0.1
    # Grids are float32, and so are the library's RMSNorm and softmax: 6e-8 a rounding.
    for model, expected in ((exported, after), (folded, before)):
        found = model(ids, use_cache=False).logits
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
