"""Step 2 finds scale, zero point and zeta of every projection.

Source: docs/algorithm.md, step 2; Section 3.4 and 4.1 of the paper (Z-Fold).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from aespa_pl.algorithm.candidates import EXHAUSTIVE, THOROUGH, Effort
from aespa_pl.algorithm.grid import min_max_grid, search_grid
from aespa_pl.algorithm.quantizer import Grid, GridFormat, joined
from aespa_pl.algorithm.zeta import candidate_zetas, nearest_loss
from aespa_pl.algorithm.zeta import fit_grids as fit_grids_of_group
from aespa_pl.block.quantized import QuantizedBlock, QuantizedProjection, grid_format
from aespa_pl.distributed.processes import World
from aespa_pl.models.family import InputGroup
from aespa_pl.settings import QuantizationSettings


def fit_grids(block: QuantizedBlock, settings: QuantizationSettings, world: World) -> None:
    """Search the grids of a block, one input group after the other; the integers are the nearest then.

    The block's Hessians are damped. The processes of the ``world`` divide the rows, and all get all grids.
    Without a search the grids are min-max, of the weights that are aimed at now.
    """
    grids: dict[str, Grid] = {}
    if not settings.grid.search:
        for name, p in block.projections.items():
            form = grid_format(settings, block.index, name)
            grids[name] = min_max_grid(p.weight, torch.ones_like(p.weight[0, 0]), form)
        block.take_grids(grids)
        return

    def search(p: QuantizedProjection, zeta: Tensor, form: GridFormat, effort: Effort) -> tuple[Grid, float]:
        share = p.share(world, coupled=False)
        searched = [search_grid(W, H, zeta, form, effort=effort) for W, H in p.problems(share)]
        whole = joined([grid for grid, _ in searched]).merged(share.whole)
        return whole, share.sum(float(sum(loss for _, loss in searched)))

    for group in block.layout.groups:
        projections = block.of_group(group)
        if not projections:
            continue
        forms = [grid_format(settings, block.index, p.projection.name) for p in projections]
        if settings.grid.awq:
            zeta = _zeta_of_inputs(block, group, forms, world)
            effort = EXHAUSTIVE if settings.grid.exhaustive else THOROUGH
            fitted = [search(p, zeta, form, effort)[0] for p, form in zip(projections, forms, strict=True)]
        else:
            fitted = fit_grids_of_group(
                [p.weight for p in projections],
                projections,
                forms,
                with_zeta=bool(settings.grid.zfold) and group.fold is not None,
                max_rounds=settings.grid.max_rounds,
                search_one=search,
                exhaustive=settings.grid.exhaustive,
            )
        grids |= {p.projection.name: grid for p, grid in zip(projections, fitted, strict=True)}
    block.take_grids(grids)


def _zeta_of_inputs(
    block: QuantizedBlock, group: InputGroup, forms: Sequence[GridFormat], world: World
) -> Tensor:
    """Return AWQ's zeta: of all powers the one with the least loss of the group's projections together."""
    projections = block.of_group(group)
    if group.fold is None:
        return torch.ones_like(projections[0].weight[0, 0])
    zetas = candidate_zetas(block.magnitudes[group.name])

    def loss(zeta: Tensor) -> float:
        shares = [(p, form, p.share(world)) for p, form in zip(projections, forms, strict=True)]
        return sum(
            share.sum(sum(nearest_loss(W, H, zeta, form) for W, H in p.problems(share)))
            for p, form, share in shares
        )

    return zetas[min(range(len(zetas)), key=lambda number: loss(zetas[number]))]
