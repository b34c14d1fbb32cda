"""Run Z-Fold, which finds scale, zero point and column factor of the projections that share an input.

Source: Jeon et al., "A Frustratingly Easy Post-Training Quantization Scheme for LLMs" (EMNLP 2023),
as used in Sections 3.4 and 4.1 of the paper.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from aespa_pl.algorithm.grid import min_max_grid, search_grid
from aespa_pl.algorithm.objectives import reconstruction_loss
from aespa_pl.algorithm.quantizer import Grid, GridFormat, dequantize, quantize

LEAST_GAIN = 1e-3
"""Share of the loss that a round must gain, or it is the last. Searches that are not thorough are no
better than that, and later rounds were seen to gain some tenths of a percent together."""
Problem = TypeVar("Problem")
"""Type of all that a search needs of a projection: weights and Hessian, or an object that has them."""
Search = Callable[..., tuple[Grid, float]]
"""Called with a problem, a zeta, the grid's format and ``thorough``: see ``search_with_loss``."""


def search_with_loss(
    W: Float[Tensor, "heads rows d_in"],
    H: Float[Tensor, "#heads d_in d_in"],
    zeta: Float[Tensor, " d_in"],
    grid_format: GridFormat,
    *,
    thorough: bool = True,
) -> tuple[Grid, float]:
    """Return what ``search_grid`` returns, and ``tr(dW H dW^T)`` under nearest rounding on it."""
    grid = search_grid(W, H, zeta, grid_format, thorough=thorough)
    loss = reconstruction_loss(dequantize(quantize(W, grid), grid) - W, H).sum()
    return grid, float(loss)


def fit_grids(
    weights: Sequence[Float[Tensor, "_ _ d_in"]],
    problems: Sequence[Problem],
    grid_format: GridFormat,
    *,
    with_zeta: bool,
    max_rounds: int,
    search_one: Search,
) -> list[Grid]:
    """Return the grids of all projections that share one input.

    Args:
        weights: Weights of each projection; d_in is the same for all.
        problems: Argument of ``search_one`` for each projection.
        grid_format: Bits, symmetry and groups, the same for all.
        with_zeta: Alternate between zeta and the search; otherwise zeta is 1 and one search is made.
        max_rounds: Alternations at most. They end when the loss of all projections together,
            ``tr(dW H dW^T)`` under nearest rounding, no longer falls; the best grids are kept.
        search_one: Returns the best grid of one projection for a zeta, and its loss. Only the searches
            whose grids may be returned are thorough: without zeta, and with the best one.
    """
    ones = torch.ones_like(weights[0][0, 0])

    def search(zeta: Tensor, *, thorough: bool) -> tuple[list[Grid], float]:
        found = [search_one(problem, zeta, grid_format, thorough=thorough) for problem in problems]
        return [grid for grid, _ in found], sum(loss for _, loss in found)

    without_zeta = search(ones, thorough=True)
    if not with_zeta:
        return without_zeta[0]
    grids = [min_max_grid(W, ones, grid_format) for W in weights]
    best_zeta, least, previous = ones, torch.inf, torch.inf
    for _ in range(max_rounds):
        zeta = least_squares_zeta(weights, grids)
        grids, loss = search(zeta, thorough=False)
        if loss < least:
            best_zeta, least = zeta, loss
        if loss >= (1 - LEAST_GAIN) * previous:
            break
        previous = loss
    with_best = search(best_zeta, thorough=True)
    return min(without_zeta, with_best, key=lambda found: found[1])[0]


def least_squares_zeta(weights: Sequence[Tensor], grids: Sequence[Grid]) -> Float[Tensor, " d_in"]:
    """Return the zeta with the least ``sum((W - zeta * scale * (q - z)) ** 2)`` in each column.

    The integers q come from nearest rounding on the given grids. A column whose best factor
    is not a positive number keeps the one that it has.
    """
    zeta = grids[0].zeta
    products, squares = torch.zeros_like(zeta), torch.zeros_like(zeta)
    for W, grid in zip(weights, grids, strict=True):
        value = dequantize(quantize(W, grid), grid) / zeta
        products += (W * value).sum((0, 1))
        squares += value.square().sum((0, 1))
    fitted = products / squares
    return torch.where((fitted > 0) & fitted.isfinite(), fitted, zeta)
