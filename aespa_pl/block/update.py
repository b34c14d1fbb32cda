"""Step 3 updates the full-precision weights before rounding (OPTQ, BoA).

Source: docs/algorithm.md, step 3.
"""

import torch
from torch import Tensor

from aespa_pl.algorithm.boa import update_rows
from aespa_pl.algorithm.optq import update_weights
from aespa_pl.block.errors import naming
from aespa_pl.block.quantized import QuantizedBlock, Rows
from aespa_pl.distributed.processes import World


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
            found = [_updated(part, rows=rows) for part in p.rows(share)]
        updated, integers, added = (torch.cat(x) for x in zip(*found, strict=True))
        p.updated = share.whole(updated)
        p.integers = share.whole(integers.to(torch.uint8))
        p.measured["extra_damping"] = world.largest(float(added.max()))


def _updated(part: Rows, *, rows: bool) -> tuple[Tensor, Tensor, Tensor]:
    if rows and part.other_side is not None:
        return update_rows(part.weight, part.hessian, part.other_side, part.grid)
    return update_weights(part.weight, part.hessian, part.grid)
