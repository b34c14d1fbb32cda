"""Round a matrix without statistics of its inputs, such as an embedding, to a block type of GGUF."""

import torch
from jaxtyping import Float
from torch import Tensor

from aespa_pl.algorithm.grid import min_max_grid
from aespa_pl.algorithm.grid_types import GridType, TypedWeight
from aespa_pl.algorithm.quantizer import Grid, GridFormat, quantize
from aespa_pl.algorithm.refit import refit

REFITS = 2
"""Times that scales and minimums are fitted to the integers, and these rounded again."""


def rounded_rows(W: Float[Tensor, "rows d_in"], kind: GridType) -> TypedWeight:
    """Return the matrix in a type: each row by its own least squares.

    A row of an embedding has scales of its own, so how often its token occurs changes nothing.
    """
    H = torch.eye(W.shape[1], device=W.device)[None]
    zeta, factor = torch.ones(W.shape[1], device=W.device), torch.ones(1, len(W), device=W.device)
    values = W[None].float()
    grid: Grid = min_max_grid(values, zeta, GridFormat.of(kind)).in_half(factor)
    q = quantize(values, grid)
    for _ in range(REFITS):
        grid = refit(q, values, grid, H, row_factor=factor)
        q = quantize(values, grid)
    if grid.factors is None:
        raise ValueError(f"{kind.name} makes no grid")
    return grid.factors.stored(q[0].to(torch.uint8))
