"""After step 4, run coordinate descent on the integers, which is not in the paper (docs/polish.md)."""

import torch
from torch import Tensor

from aespa_pl.algorithm.descent import Descent, descend
from aespa_pl.algorithm.objectives import reconstruction_loss
from aespa_pl.algorithm.quantizer import Grid, dequantize, joined
from aespa_pl.algorithm.refit import refit
from aespa_pl.block.quantized import QuantizedBlock, QuantizedProjection, Rows
from aespa_pl.distributed.processes import RowShare, World

REFITS = 2
"""Times that a block type's grid is fitted to the integers, which descend on it once more."""


def polish(block: QuantizedBlock, passes: int, world: World) -> None:
    """Move each integer to its best value with all others fixed, again and again.

    Args:
        block: The block, with integers.
        passes: Visits of all integers at most.
        world: The processes that divide the rows; all of them get all integers.
    """
    projections = block.projections.values()
    coupled = [p for p in projections if p.other_side is not None]
    for form in dict.fromkeys(p.grid.form for p in coupled):  # each visit has one range of integers
        _polish_coupled([p for p in coupled if p.grid.form == form], passes, world)
    for p in projections:
        if p.other_side is None:
            found = [
                descend_rows(rows, passes, heads_alone=len(p.hessian) > 1) for rows in p.rows(p.share(world))
            ]
            _take(p, found, world)


def _polish_coupled(projections: list[QuantizedProjection], passes: int, world: World) -> None:
    """Polish query and key of the same form together: their heads are independent, and they share H.

    Their rows are visited a few at a time, so twice the heads take hardly longer.
    """
    each = [next(p.rows(p.share(world))) for p in projections]
    found, grid = descend_rows(_together(each), passes)
    first = 0
    for p, rows in zip(projections, each, strict=True):
        heads = slice(first, first + len(rows.weight))
        # by itself, as it was and will be measured: a product of other rows has other rounding errors
        dW = dequantize(rows.integers, rows.grid) - rows.weight
        before = reconstruction_loss(dW, rows.hessian, rows.other_side)
        descent = Descent(found.integers[heads], found.passes[heads], before, found.losses[heads])
        _take(p, [(descent, grid.heads(first, heads.stop - first))], world)
        first = heads.stop


def _together(each: list[Rows]) -> Rows:
    """Return the heads of several projections with one H as one projection's."""
    return Rows(
        torch.cat([rows.weight for rows in each]),
        joined([rows.grid for rows in each]),
        torch.cat([rows.integers for rows in each]),
        torch.cat([rows.row_factor for rows in each]),
        each[0].hessian,
        torch.cat([rows.other_side for rows in each if rows.other_side is not None]),
    )


def descend_rows(rows: Rows, passes: int, *, heads_alone: bool = False) -> tuple[Descent, Grid]:
    """Return the descent, and the grid: a block type's is fitted to the integers between descents."""
    W, H, G, grid = rows.weight, rows.hessian, rows.other_side, rows.grid
    found = descend(rows.integers, W, grid, H, G, passes=passes, heads_alone=heads_alone)
    for _ in range(REFITS if grid.factors is not None else 0):
        grid = refit(found.integers, W, grid, H, G, row_factor=rows.row_factor)
        more = descend(found.integers, W, grid, H, G, passes=passes, heads_alone=heads_alone)
        losses = torch.cat([found.losses, more.losses[:, 1:]], 1)
        found = Descent(more.integers, found.passes + more.passes, found.loss_before, losses)
    return found, grid


def _take(p: QuantizedProjection, found: list[tuple[Descent, Grid]], world: World) -> None:
    """Take the integers of this process's rows and of all others', and write down what was found."""
    share = p.share(world)
    descents, grids = [part for part, _ in found], [grid for _, grid in found]
    before, p.integers = p.integers, share.whole(torch.cat([part.integers for part in descents]))
    p.grid = share.whole_grid(joined(grids))
    p.descent = _summed([part.losses.sum(0) for part in descents], share, world)
    p.measured |= {
        "before_polish": share.sum(sum(float(part.loss_before.sum()) for part in descents)),
        "polish_passes": int(world.largest(max(float(part.passes.max()) for part in descents))),
        "polish_changed": int((p.integers != before).sum()),
    }


def _summed(curves: list[Tensor], share: RowShare, world: World) -> list[float]:
    """Return the sum of all rows' losses after each pass; rows that end early keep their last loss."""
    steps = int(world.largest(max(map(len, curves))))
    whole = sum(torch.cat([c, c[-1:].expand(steps - len(c))]) for c in curves)
    return [share.sum(loss) for loss in torch.as_tensor(whole).tolist()]
