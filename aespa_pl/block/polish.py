"""After step 4, run coordinate descent on the integers, which is not in the paper (docs/polish.md)."""

from dataclasses import replace

import torch

from aespa_pl.algorithm.descent import Descent, descend
from aespa_pl.algorithm.objectives import reconstruction_loss
from aespa_pl.algorithm.quantizer import dequantize
from aespa_pl.block.quantized import QuantizedBlock, QuantizedProjection, Rows
from aespa_pl.distributed.processes import World


def polish(block: QuantizedBlock, passes: int, world: World) -> None:
    """Move each integer to its best value with all others fixed, again and again.

    Args:
        block: The block, with integers.
        passes: Visits of all integers at most.
        world: The processes that divide the rows; all of them get all integers.
    """
    projections = block.projections.values()
    coupled = [p for p in projections if p.other_side is not None]
    for bits in dict.fromkeys(p.grid.bits for p in coupled):  # each visit has one range of integers
        _polish_coupled([p for p in coupled if p.grid.bits == bits], passes, world)
    for p in projections:
        if p.other_side is None:
            found = [
                _descend(rows, passes, heads_alone=len(p.hessian) > 1)
                for rows in p.rows(p.share(world))
            ]
            _take(p, found, world)


def _polish_coupled(projections: list[QuantizedProjection], passes: int, world: World) -> None:
    """Polish query and key of the same bits together: their heads are independent, and they share H.

    Their rows are visited a few at a time, so twice the heads take hardly longer.
    """
    each = [next(p.rows(p.share(world))) for p in projections]
    found = _descend(_together(each), passes)
    first = 0
    for p, rows in zip(projections, each, strict=True):
        heads = slice(first, first + len(rows.weight))
        # by itself, as it was and will be measured: a product of other rows has other rounding errors
        dW = dequantize(rows.integers, rows.grid) - rows.weight
        before = reconstruction_loss(dW, rows.hessian, rows.other_side)
        _take(p, [Descent(found.integers[heads], found.passes[heads], before)], world)
        first = heads.stop


def _together(each: list[Rows]) -> Rows:
    """Return the heads of several projections with one H as one projection's."""
    grids = [rows.grid for rows in each]
    return Rows(
        torch.cat([rows.weight for rows in each]),
        replace(
            grids[0],
            scale=torch.cat([grid.scale for grid in grids]),
            zero_point=torch.cat([grid.zero_point for grid in grids]),
        ),
        torch.cat([rows.integers for rows in each]),
        each[0].hessian,
        torch.cat([rows.other_side for rows in each if rows.other_side is not None]),
    )


def _descend(rows: Rows, passes: int, *, heads_alone: bool = False) -> Descent:
    q, W, H = rows.integers, rows.weight, rows.hessian
    return descend(q, W, rows.grid, H, rows.other_side, passes=passes, heads_alone=heads_alone)


def _take(p: QuantizedProjection, found: list[Descent], world: World) -> None:
    """Take the integers of this process's rows and of all others', and write down what was found."""
    share = p.share(world)
    before, p.integers = p.integers, share.whole(torch.cat([part.integers for part in found]))
    p.measured |= {
        "before_polish": share.sum(sum(float(part.loss_before.sum()) for part in found)),
        "polish_passes": int(world.largest(max(float(part.passes.max()) for part in found))),
        "polish_changed": int((p.integers != before).sum()),
    }
