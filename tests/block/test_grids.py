"""Each group of inputs shares a zeta, and each group of columns has a scale that float16 can hold."""

from dataclasses import replace

import pytest
import torch

from aespa_pl.algorithm.quantizer import Grid
from aespa_pl.block.grids import fit_grids
from aespa_pl.block.quantized import QuantizedBlock
from aespa_pl.distributed.processes import ALONE
from aespa_pl.resolve import resolved
from aespa_pl.settings import GridSettings
from tests.block.blocks import FEW, begin, example, gridded, linear, make_statistics, updated
from tests.models.examples import every_example


@every_example
def test_zeta_is_shared_in_a_group_and_one_where_it_cannot_be_folded(name: str) -> None:
    problem = gridded(name)
    grids = grids_of(problem)
    for group in problem.layout.groups:
        zetas = [grids[p.name].zeta for p in group.projections]
        assert all(torch.equal(zeta, zetas[0]) for zeta in zetas)
        assert bool((zetas[0] > 0).all())
        assert bool((zetas[0] == 1).all()) == (group.fold is None)
    folded = {group.name for group in problem.layout.groups if group.fold is not None}
    assert set(problem.zetas()) == folded


def grids_of(block: QuantizedBlock) -> dict[str, Grid]:
    return {name: p.grid for name, p in block.projections.items()}


def total_loss(block: QuantizedBlock, names: list[str]) -> float:
    """Return the sum of ``dw H dw^T`` over all rows under nearest rounding, in float64."""
    total = 0.0
    for name in names:
        p = block.projections[name]
        W, H, grid = p.weight.double(), p.hessian[:].double(), p.grid
        H = H.expand(W.shape[0], -1, -1)
        for head in range(W.shape[0]):
            for row in range(W.shape[1]):
                step = grid.scale[head, row, 0].double() * grid.zeta.double()
                zero = grid.zero_point[head, row, 0].double()
                q = ((W[head, row] / step).round() + zero).clamp(0, 2**grid.bits - 1)
                error = step * (q - zero) - W[head, row]
                total += float(error @ H[head] @ error)
    return total


def test_more_rounds_of_zfold_lower_the_loss_of_each_group() -> None:
    losses: list[list[float]] = []
    for grid in (GridSettings(zfold=False), GridSettings(max_rounds=1), GridSettings()):
        problem = gridded("llama-grouped", resolved(replace(FEW, grid=grid)))
        losses.append(
            [
                total_loss(problem, [p.name for p in group.projections])
                for group in problem.layout.groups
                if group.fold is not None
            ]
        )
    for plain, one, many in zip(*losses, strict=True):
        assert many <= one * (1 + 1e-3)  # scales are rounded to float16
        assert one <= plain * (1 + 1e-3)
    assert sum(losses[2]) < sum(losses[1]) < sum(losses[0])


def test_zero_points_have_no_more_bits_than_weights() -> None:
    """Of rows without a positive weight as well, whose zero is the largest integer."""
    block, layout = example("llama-grouped")
    linear(block, "mlp.up_proj").weight.abs_().neg_()
    problem = begin(block, layout, make_statistics(block, layout))
    fit_grids(problem, replace(FEW, bits=4), ALONE)
    grid = problem.projections["up_proj"].grid
    assert 0 <= float(grid.zero_point.min()) <= float(grid.zero_point.max()) <= 15


@pytest.mark.parametrize("factor", [1.0, 1e-7, 1e7])
@pytest.mark.parametrize("name", ["opt", "bloom", "llama"])
def test_exported_scales_are_float16_numbers(name: str, factor: float) -> None:
    """Of weights beyond what float16 can hold as well."""
    block, layout = example(name)
    for p in layout.projections:
        linear(block, p.module).weight.mul_(factor if p.fused[0] == 0 else 1)
    problem = begin(block, layout, make_statistics(block, layout))
    for found in updated(problem).projections.values():
        assert torch.equal(found.folded_grid.scale.half().float(), found.folded_grid.scale)
        assert bool(found.folded_grid.scale.isfinite().all())
        assert bool((found.folded_grid.scale > 0).all())
