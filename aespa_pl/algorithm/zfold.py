"""Z-Fold: scale, zero point and column factor of the projections that share an input.

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

Problem = TypeVar("Problem")
"""What a search needs of a projection beside its weights: its Hessian, or what leads to it."""


def search_with_loss(
    W: Float[Tensor, "heads rows d_in"],
    H: Float[Tensor, "#heads d_in d_in"],
    zeta: Float[Tensor, " d_in"],
    grid_format: GridFormat,
) -> tuple[Grid, float]:
    """Return what ``search_grid`` returns, and ``tr(dW H dW^T)`` under nearest rounding on it."""
    grid = search_grid(W, H, zeta, grid_format)
    loss = reconstruction_loss(dequantize(quantize(W, grid), grid) - W, H).sum()
    return grid, float(loss)


def fit_grids(
    weights: Sequence[Float[Tensor, "_ _ d_in"]],
    problems: Sequence[Problem],
    grid_format: GridFormat,
    *,
    with_zeta: bool,
    max_rounds: int,
    search_one: Callable[[Problem, Tensor, GridFormat], tuple[Grid, float]],
) -> list[Grid]:
    """Return the grids of all projections that share one input.

    Args:
        weights: Weights of each projection; d_in is the same for all.
        problems: What ``search_one`` is called with for each projection.
        grid_format: Bits, symmetry and groups, the same for all.
        with_zeta: Alternate between zeta and the search; otherwise zeta is 1 and one search is made.
        max_rounds: Alternations at most. They end when the loss of all projections together,
            ``tr(dW H dW^T)`` under nearest rounding, no longer falls; the best grids are kept.
        search_one: Returns the best grid of one projection for a zeta, and its loss.
    """
    zeta = torch.ones_like(weights[0][0, 0])

    def search(zeta: Tensor) -> tuple[list[Grid], float]:
        found = [search_one(problem, zeta, grid_format) for problem in problems]
        return [grid for grid, _ in found], sum(loss for _, loss in found)

    best, best_loss = search(zeta)
    if not with_zeta:
        return best
    grids = [min_max_grid(W, zeta, grid_format) for W in weights]
    previous = torch.inf
    for _ in range(max_rounds):
        zeta = least_squares_zeta(weights, grids)
        grids, loss = search(zeta)
        if loss < best_loss:
            best, best_loss = grids, loss
        if loss >= previous:
            break
        previous = loss
    return best


def least_squares_zeta(weights: Sequence[Tensor], grids: Sequence[Grid]) -> Float[Tensor, " d_in"]:
    """Return the zeta with the least ``sum((W - zeta * scale * (q - z)) ** 2)`` in each column.

    The integers q are those of nearest rounding on the grids as they are. A column whose best factor
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
