"""Find the grids of the projections that share an input, with zeta, the factor of each of its columns.

Z-Fold alternates between zeta and the other parameters: Jeon et al., "A Frustratingly Easy Post-Training
Quantization Scheme for LLMs" (EMNLP 2023), as used in Sections 3.4 and 4.1 of the paper.

AWQ multiplies a column of weights by ``mean|x| ** alpha`` before rounding and divides it by the same
afterwards, so that the columns of large inputs are rounded finely. zeta divides before rounding, so it is the
inverse. Source: Lin et al., "AWQ: Activation-aware Weight Quantization" (arXiv 2306.00978), Section 3.2.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from aespa_pl.algorithm.candidates import EXHAUSTIVE, QUICK, THOROUGH, Effort
from aespa_pl.algorithm.grid import min_max_grid
from aespa_pl.algorithm.objectives import reconstruction_loss
from aespa_pl.algorithm.quantizer import Grid, GridFormat, dequantize, quantize

LEAST_GAIN = 1e-3
"""Fraction of the loss that a round must gain, or it is the last: quick searches are no better than that."""
LEAP = 4.0
"""Exponent of zeta's step from 3 bits on. The finer the integers, the less the best factor for fixed integers
differs from the last one: at 4 bits the loss still fell by a percent in the thirtieth plain step."""
Problem = TypeVar("Problem")
"""Type of all that a search needs of a projection: weights and Hessian, or an object that has them."""
Search = Callable[[Problem, Tensor, GridFormat, Effort], tuple[Grid, float]]
"""Returns the grid of a problem for a zeta, and its loss (see ``grid.search_grid``)."""
POWERS = 20
"""Powers alpha 0, 1/20 ... 19/20 that are compared."""
LEAST_MAGNITUDE = 1e-4
"""Fraction of the largest mean absolute input that the others count as at least: dead inputs have 0."""


def fit_grids(
    weights: Sequence[Float[Tensor, "_ _ d_in"]],
    problems: Sequence[Problem],
    formats: Sequence[GridFormat],
    *,
    with_zeta: bool,
    max_rounds: int,
    search_one: Search[Problem],
    exhaustive: bool = False,
) -> list[Grid]:
    """Return the grids of all projections that share one input.

    Zeta and the search alternate ``with_zeta``, otherwise zeta is 1 and one search is made. The alternations,
    ``max_rounds`` at most, end when the loss of all projections together, ``tr(dW H dW^T)`` under nearest
    rounding, falls by less than a thousandth. From 3 bits on zeta's steps are longer than least squares says,
    as long as that lowers the loss. The last search has the best zeta of all, which may be 1; it alone is
    thorough. With ``exhaustive`` all searches try each candidate, and go on while the loss falls.
    """
    quick, last = (EXHAUSTIVE, EXHAUSTIVE) if exhaustive else (QUICK, THOROUGH)
    least_gain = 0.0 if exhaustive else LEAST_GAIN
    ones = torch.ones_like(weights[0][0, 0])

    def search(zeta: Tensor, effort: Effort) -> tuple[list[Grid], float]:
        searched = [
            search_one(problem, zeta, form, effort) for problem, form in zip(problems, formats, strict=True)
        ]
        return [grid for grid, _ in searched], sum(loss for _, loss in searched)

    if not with_zeta:
        return search(ones, last)[0]
    _, without_zeta = search(ones, quick)
    # from the searched grids it ended at losses that were 1.8 % lower to 1.5 % higher (docs/performance.md)
    grids = [min_max_grid(W, ones, form) for W, form in zip(weights, formats, strict=True)]
    fine = all(form.bits > 2 for form in formats)
    least, exponent = torch.inf, LEAP if fine and not exhaustive else 1.0
    for _ in range(max_rounds):
        zeta = grids[0].zeta * (least_squares_zeta(weights, grids) / grids[0].zeta) ** exponent
        searched, loss = search(zeta, quick)
        gains = loss < (1 - least_gain) * least
        if loss < least:
            grids, least = searched, loss
        if not gains and exponent == 1:
            break
        if not gains:
            exponent = 1.0
    return search(grids[0].zeta if least < without_zeta else ones, last)[0]


def least_squares_zeta(weights: Sequence[Tensor], grids: Sequence[Grid]) -> Float[Tensor, " d_in"]:
    """Return the zeta with the least ``sum((W - zeta * scale * (q - z)) ** 2)`` in each column.

    The integers q are the nearest on the given grids. A column whose best factor isn't positive keeps its
    own.
    """
    zeta = grids[0].zeta
    products, squares = torch.zeros_like(zeta), torch.zeros_like(zeta)
    for W, grid in zip(weights, grids, strict=True):
        value = dequantize(quantize(W, grid), grid) / zeta
        products += (W * value).sum((0, 1))
        squares += value.square().sum((0, 1))
    fitted = products / squares
    return torch.where((fitted > 0) & fitted.isfinite(), fitted, zeta)


def candidate_zetas(magnitude: Float[Tensor, " d_in"]) -> Float[Tensor, "powers d_in"]:
    """Return zeta for each power alpha of the mean absolute inputs; the first is 1 everywhere.

    Its largest and smallest factor are inverse to each other: what zeta is folded into keeps its size.
    """
    tiny = torch.finfo(magnitude.dtype).tiny
    floor = max(tiny, LEAST_MAGNITUDE * float(magnitude.max()))
    log = magnitude.clamp(min=floor).log()
    centred = log - (log.max() + log.min()) / 2
    alpha = torch.arange(POWERS, dtype=log.dtype, device=log.device) / POWERS
    return torch.exp(-alpha[:, None] * centred)


def nearest_loss(
    W: Float[Tensor, "heads rows d_in"],
    H: Float[Tensor, "#heads d_in d_in"],
    zeta: Float[Tensor, " d_in"],
    grid_format: GridFormat,
) -> float:
    """Return ``tr(dW H dW^T)`` of nearest rounding on the min-max grid of ``W / zeta``."""
    grid = min_max_grid(W, zeta, grid_format)
    return float(reconstruction_loss(dequantize(quantize(W, grid), grid) - W, H).sum())
