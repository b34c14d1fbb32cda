"""Find integers without training: OPTQ's and BoA's update of weights before rounding, and coordinate descent.

Source: docs/algorithm.md, step 3; docs/polish.md for the descent, which is not in the paper.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aespa_pl.algorithm.descent import Descent, descend
from aespa_pl.algorithm.objectives import keep_better, reconstruction_loss
from aespa_pl.algorithm.optq import (
    FactoredColumns,
    factor_columns,
    factored_for_all,
    update_rows,
    update_weights,
)
from aespa_pl.algorithm.quantizer import Grid, dequantize, joined
from aespa_pl.algorithm.refit import refit
from aespa_pl.block.quantized import QuantizedBlock, QuantizedProjection, Rows
from aespa_pl.distributed.processes import World
from aespa_pl.measure import release_memory

REFITS = 2
"""Times that a block type's grid is fitted to the integers, which are found once more on it: each lowers the
loss of OPTQ by some percent, and a third one by little."""


def update(block: QuantizedBlock, world: World, *, rows: bool = False) -> None:
    """Replace the integers by OPTQ's, and keep W' where the learning starts from it (step 3).

    The processes of the ``world`` divide the rows, and all get all integers. With ``rows`` later rows
    compensate as well, where the objective couples the rows of a head (BoA). Raises NumericalError, with the
    name of the projection, where a Hessian cannot be factored.
    """
    H, factored = None, None  # projections with one H, such as gate and up, follow one another
    for p in block.projections.values():
        share = p.share(world, coupled=False)
        with block.naming(p), world.failing_together():
            if p.hessian is not H:
                H, factored = p.hessian, None  # in this order: two factors of a wide input may not fit
                if len(H) == 1 and (p.other_side is None or not rows):
                    factored = factor_columns(H[:])
            found = [updated_rows(part, factored, rows=rows) for part in p.rows(share)]
        updated, integers, grids, added = zip(*found, strict=True)
        if p.learned:
            p.updated = share.whole(torch.cat(updated))
        del found, updated
        p.integers = share.whole(torch.cat(integers).to(torch.uint8))
        p.grid = joined(grids).merged(share.whole)
        p.measured["extra_damping"] = world.largest(float(torch.cat(added).max()))


def updated_rows(
    part: Rows, factored: FactoredColumns | None = None, *, rows: bool = False
) -> tuple[Tensor, Tensor, Grid, Tensor]:
    """Return W', integers, grid and extra damping; a block type's grid follows the integers, and these it.

    H is ``factored`` already, or it is here.
    """
    W, H, G, grid = part.weight, part.hessian, part.other_side, part.grid
    if rows and G is not None:
        update_on = partial(update_rows, W, H, G)
    else:  # the factors do not depend on the grid
        if factored is None and grid.factors is not None:
            factored = factored_for_all(H)
        update_on = partial(update_weights, W, H, factored=factored)
    updated, integers, added = update_on(grid)
    for _ in range(REFITS if grid.factors is not None else 0):
        grid, before = refit(integers, W, grid, H, G, row_factor=part.row_factor)
        again, q, _ = update_on(grid)
        after = reconstruction_loss(dequantize(q, grid) - W, H, G)
        integers = keep_better(integers, before, q, after)
        updated = keep_better(updated, before, again, after)
    return updated, integers, grid, added


def polish(block: QuantizedBlock, passes: int, world: World) -> None:
    """After step 4, move each integer to its best value with all others fixed, in at most so many ``passes``.

    The processes of the ``world`` divide the rows, and all get all integers.
    """
    projections = block.projections.values()
    coupled: dict[Any, list[QuantizedProjection]] = {}  # each visit has one range of integers
    for p in projections:
        if p.other_side is not None:
            name = p.projection.name if p.heads == 1 else None
            coupled.setdefault((p.grid.form, id(p.hessian), p.weight.shape[1:], name), []).append(p)
    for together in coupled.values():
        _polish_coupled(together, passes, world)
    for p in projections:
        if p.other_side is None:
            release_memory()  # ever fewer rows are under way, whose tensors fit ever smaller free pieces
            each, alone = p.rows(p.share(world)), len(p.hessian) > 1
            _take(p, [descend_rows(rows, passes, heads_alone=alone) for rows in each], world)


def _polish_coupled(projections: list[QuantizedProjection], passes: int, world: World) -> None:
    """Polish projections of the same form together, query and key: their heads are independent, H is shared.

    Their rows are visited a few at a time, so twice the heads take hardly longer.
    """
    each = [next(p.rows(p.share(world))) for p in projections]
    found, grid = descend_rows(each[0] if len(each) == 1 else _joined(each), passes)
    first = 0
    for p, rows in zip(projections, each, strict=True):
        heads = slice(first, first + len(rows.weight))
        # by itself, as it was and will be measured: a product of other rows has other rounding errors
        descent = Descent(found.integers[heads], found.passes[heads], rows.loss(), found.losses[heads])
        _take(p, [(descent, grid.heads(first, heads.stop - first))], world)
        first = heads.stop


def _joined(each: Sequence[Rows]) -> Rows:
    """Return a copy of the rows of projections that have the same Hessian."""
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
        grid, _ = refit(found.integers, W, grid, H, G, row_factor=rows.row_factor)
        more = descend(found.integers, W, grid, H, G, passes=passes, heads_alone=heads_alone)
        losses = torch.cat([found.losses, more.losses[:, 1:]], 1)
        found = Descent(more.integers, found.passes + more.passes, found.loss_before, losses)
    return found, grid


def _take(p: QuantizedProjection, found: list[tuple[Descent, Grid]], world: World) -> None:
    """Take the integers of this process's rows and of all others', and write down what was found."""
    share, descents = p.share(world), [part for part, _ in found]
    before, p.integers = p.integers, share.whole(torch.cat([part.integers for part in descents]))
    p.grid = joined([grid for _, grid in found]).merged(share.whole)
    # rows that end early keep their last loss
    curves = [part.losses.sum(0) for part in descents]
    steps = int(world.largest(max(map(len, curves))))
    whole = sum(torch.cat([c, c[-1:].expand(steps - len(c))]) for c in curves)
    p.descent = [share.sum(loss) for loss in torch.as_tensor(whole).tolist()]
    p.measured |= {
        "before_polish": share.sum(sum(float(part.loss_before.sum()) for part in descents)),
        "polish_passes": int(world.largest(max(float(part.passes.max()) for part in descents))),
        "polish_changed": int((p.integers != before).sum()),
    }
