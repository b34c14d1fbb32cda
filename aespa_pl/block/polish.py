"""After step 4: coordinate descent on the integers, which is not in the paper (docs/polish.md)."""

import torch

from aespa_pl.algorithm.descent import descend
from aespa_pl.block.quantized import QuantizedBlock, QuantizedProjection
from aespa_pl.distributed.processes import World


def polish(block: QuantizedBlock, passes: int, world: World) -> None:
    """Move each integer to its best value with all others fixed, again and again.

    Args:
        block: The block, with integers.
        passes: Visits of all integers at most.
        world: The processes that divide the rows; all of them get all integers.
    """
    for p in block.projections.values():
        _polish(p, passes, world)


def _polish(p: QuantizedProjection, passes: int, world: World) -> None:
    share = p.share(world)
    found = [
        descend(r.integers, r.weight, r.grid, r.hessian, r.other_side, passes=passes)
        for r in p.rows(share)
    ]
    p.integers = share.whole(torch.cat([part.integers for part in found]))
    p.measured |= {
        "before_polish": share.sum(sum(part.loss_before for part in found)),
        "polish_passes": int(world.largest(max(part.passes for part in found))),
        "polish_changed": int(share.sum(sum(part.changed for part in found))),
    }
