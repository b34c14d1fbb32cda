"""Step 3 updates the full-precision weights before rounding (OPTQ, BoA).

Source: docs/algorithm.md, step 3.
"""

import torch
from torch import Tensor

from aespa_pl.algorithm.objectives import keep_better, reconstruction_loss
from aespa_pl.algorithm.optq import update_rows, update_weights
from aespa_pl.algorithm.quantizer import Grid, dequantize, joined
from aespa_pl.algorithm.refit import refit
from aespa_pl.block.errors import naming
from aespa_pl.block.quantized import QuantizedBlock, Rows
from aespa_pl.distributed.processes import World

REFITS = 2
"""Times that OPTQ runs again on a block type's grid that was fitted to its integers: each lowers the loss by
some percent, and a third one by little."""


def update(block: QuantizedBlock, world: World, *, rows: bool = False) -> None:
    """Replace the integers by OPTQ's, and keep W' as the start of the learning.

    Args:
        block: The block, with grids.
        world: The processes that divide the rows; all of them get all integers.
        rows: Compensate in later rows as well, where the objective couples the rows of a head (BoA).

    Raises:
        NumericalError: A Hessian cannot be factored; the message names the projection.
    """
    for p in block.projections.values():
        share = p.share(world)
        with naming(block, p), world.failing_together():
            found = [updated_rows(part, rows=rows) for part in p.rows(share)]
        updated, integers, grids, added = zip(*found, strict=True)
        p.updated = share.whole(torch.cat(updated))
        p.integers = share.whole(torch.cat(integers).to(torch.uint8))
        p.grid = share.whole_grid(joined(grids))
        p.measured["extra_damping"] = world.largest(float(torch.cat(added).max()))


def updated_rows(part: Rows, *, rows: bool = False) -> tuple[Tensor, Tensor, Grid, Tensor]:
    """Return W', integers, grid and extra damping; a block type's grid follows the integers, and these it."""
    updated, integers, added = _update(part, part.grid, rows=rows)
    grid = part.grid
    for _ in range(REFITS if grid.factors is not None else 0):
        grid = refit(integers, part.weight, grid, part.hessian, part.other_side, row_factor=part.row_factor)
        again = _update(part, grid, rows=rows)
        losses = [
            reconstruction_loss(dequantize(q, grid) - part.weight, part.hessian, part.other_side)
            for q in (integers, again[1])
        ]
        integers = keep_better(integers, losses[0], again[1], losses[1])
        updated = keep_better(updated, losses[0], again[0], losses[1])
    return updated, integers, grid, added


def _update(part: Rows, grid: Grid, *, rows: bool) -> tuple[Tensor, Tensor, Tensor]:
    if rows and part.other_side is not None:
        return update_rows(part.weight, part.hessian, part.other_side, grid)
    return update_weights(part.weight, part.hessian, grid)
