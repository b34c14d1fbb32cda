"""Find the grid of each row, or of each of its groups of columns, for a small ``dw H dw^T``.

Scale and zero point of a uniform grid are searched over clip ratios; the numbers of a block type are fitted
(``factors.py``).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from aespa_pl.algorithm.candidates import THOROUGH, Candidates, Effort, best_grids, best_weighted
from aespa_pl.algorithm.factors import fit_factors
from aespa_pl.algorithm.objectives import reconstruction_loss
from aespa_pl.algorithm.quantizer import Grid, GridFormat, dequantize, quantize

CLIP_RATIOS = 100
"""Ratios 1.00, 0.99 ... 0.01 of the min-max range (docs/algorithm.md)."""
MOST_GRIDS = 2**26
"""Candidates of rows and groups that are compared at once, which take about 25 bytes each."""


def min_max_grid(
    W: Float[Tensor, "heads rows d_in"], zeta: Float[Tensor, " d_in"], grid_format: GridFormat
) -> Grid:
    """Return the grid from the smallest to the largest weight; of a block type, its fit where H is 1."""
    if grid_format.kind is not None:
        return weighted_grid(W, torch.ones_like(zeta), zeta, grid_format)
    scale, zero_point = _range(_split(W / zeta, grid_format.group_size), grid_format)
    return Grid(scale, zero_point.round(), zeta, grid_format.bits)


def min_max_range(
    V: Float[Tensor, "*rows columns"], *, symmetric: bool
) -> tuple[Float[Tensor, "*rows"], Float[Tensor, "*rows"]]:
    """Return the ends of the range from each row's smallest to its largest weight, with 0 inside."""
    low, high = V.amin(-1).clamp(max=0), V.amax(-1).clamp(min=0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    empty = (low == 0) & (high == 0)  # a row of zeros: any range does
    return torch.where(empty, -1, low), torch.where(empty, 1, high)


def search_grid(
    W: Float[Tensor, "heads rows d_in"],
    H: Float[Tensor, "#heads d_in d_in"],
    zeta: Float[Tensor, " d_in"],
    grid_format: GridFormat,
    *,
    effort: Effort = THOROUGH,
) -> tuple[Grid, Float[Tensor, ""]]:
    """Return a grid with nearly the least ``dw H dw^T`` for each row under nearest rounding, and its loss.

    Of a uniform grid every clip ratio is compared with the floor and the ceiling of the zero point; how, and
    how near the least loss that comes, stands in ``candidates.py``. With groups of columns each group is
    searched on its own diagonal block of H, and the loss is the sum of theirs.
    """
    size, kind = grid_format.group_size, grid_format.kind
    grids, losses = [], []
    # heads one by one: the blocks of H take as much memory as H
    for h, rows in enumerate(W.reshape(H.shape[0], -1, W.shape[-1])):
        blocks = _blocks(H[h], zeta, size)
        V = _split(rows / zeta, size).transpose(0, 1).contiguous()  # products would copy it otherwise
        if kind is None:
            of_row = (1 if grid_format.symmetric else 2) * CLIP_RATIOS * len(V)
            found = [
                best_grids(some.contiguous(), blocks, _candidates(some, grid_format), effort=effort)
                for some in V.split(max(1, MOST_GRIDS // of_row), 1)
            ]
            scale, zero_point, loss = (torch.cat(each, 1) for each in zip(*found, strict=True))
            grids.append(Grid(scale.T[None], zero_point.T[None], zeta, grid_format.bits))
            losses.append(loss)
        else:
            grids.append(Grid.of(fit_factors(V, blocks, kind), zeta))
    grid = grids[0].merged(lambda *same: torch.cat(same).view(*W.shape[:2], -1), *grids[1:])
    if kind is None:
        return grid, torch.cat(losses, 1).sum()
    return grid, reconstruction_loss(dequantize(quantize(W, grid), grid) - W, H).sum()


def weighted_grid(
    W: Float[Tensor, "heads rows d_in"],
    D: Float[Tensor, " d_in"],
    zeta: Float[Tensor, " d_in"],
    grid_format: GridFormat,
) -> Grid:
    """Return the grid of ``search_grid`` where H is ``diag(D)``, without a product with H.

    A uniform scale stays the best of the candidates, all of which are compared.
    """
    V = _split(W / zeta, grid_format.group_size).flatten(0, 1).transpose(0, 1).contiguous()
    weights = (D * zeta.square()).view(len(V), -1)
    if grid_format.kind is None:
        scale, zero_point = best_weighted(V, weights, _candidates(V, grid_format))
        grid = Grid(scale.T[None], zero_point.T[None], zeta, grid_format.bits)
    else:
        grid = Grid.of(fit_factors(V, weights.diag_embed(), grid_format.kind), zeta)
    return grid.merged(lambda x: x.reshape(*W.shape[:2], -1))


def _split(V: Tensor, group_size: int | None) -> Tensor:
    """Return ``[..., d_in]`` as ``[..., groups, columns]``."""
    return V.reshape(*V.shape[:-1], -1, group_size or V.shape[-1])


def _blocks(H: Tensor, zeta: Tensor, group_size: int | None) -> Tensor:
    """Return the diagonal blocks ``[groups, columns, columns]`` of H, as weights over zeta meet it."""
    size = group_size or len(H)
    blocks = H.reshape(-1, size, len(H) // size, size).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    factors = zeta.view(-1, size)
    return (factors[:, :, None] * blocks).mul_(factors[:, None]).contiguous()


def _range(V: Tensor, grid_format: GridFormat) -> tuple[Tensor, Tensor]:
    """Return scale and (not yet rounded) zero point of the min-max range."""
    largest = 2**grid_format.bits - 1
    low, high = min_max_range(V, symmetric=grid_format.symmetric)
    scale = (high - low) / largest
    if grid_format.symmetric:
        return scale, torch.full_like(scale, 2 ** (grid_format.bits - 1))
    return scale, (-low / scale).clamp(max=largest)  # the quotient may be a rounding error above


def _candidates(V: Float[Tensor, "groups rows columns"], grid_format: GridFormat) -> Candidates:
    """Return all clip ratios with both roundings of the zero point."""
    scale, zero_point = _range(V, grid_format)
    ratios = torch.arange(CLIP_RATIOS, 0, -1, dtype=V.dtype, device=V.device) / CLIP_RATIOS
    zero_points = torch.stack([zero_point.floor(), zero_point.ceil()], -1)  # [groups, rows, 2]
    if bool((zero_points[..., 0] == zero_points[..., 1]).all()):  # symmetric: half the work
        zero_points = zero_points[..., :1]
    return Candidates(
        (scale[..., None] * ratios).repeat(1, 1, zero_points.shape[-1]),
        zero_points.repeat_interleave(CLIP_RATIOS, -1),
        2**grid_format.bits - 1,
    )
