"""Find scale and zero point of each row, by a search over clip ratios for a small ``dw H dw^T``."""

import torch
from jaxtyping import Float
from torch import Tensor

from aespa_pl.algorithm.candidate_losses import Candidates
from aespa_pl.algorithm.candidates import THOROUGH, Effort, best_grids
from aespa_pl.algorithm.grid_types import GridType
from aespa_pl.algorithm.objectives import reconstruction_loss
from aespa_pl.algorithm.quantizer import Grid, GridFormat, dequantize, quantize
from aespa_pl.algorithm.typed_grid import fit_factors

CLIP_RATIOS = 100
"""Ratios 1.00, 0.99 ... 0.01 of the min-max range (docs/algorithm.md)."""


def min_max_grid(
    W: Float[Tensor, "heads rows d_in"], zeta: Float[Tensor, " d_in"], grid_format: GridFormat
) -> Grid:
    """Return the grid from the smallest to the largest weight of each row (and group of columns).

    Of a block type it is the fit with the same weight for all columns.
    """
    if grid_format.kind is not None:
        H = torch.eye(W.shape[-1], dtype=W.dtype, device=W.device)
        return _search_typed(W, H[None], zeta, grid_format.kind)[0]
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

    Every clip ratio is compared with the floor and the ceiling of the zero point; how, and how near
    the least loss that comes, stands in ``candidates.py``. With groups of columns each group is
    searched on its own diagonal block of H.
    """
    if grid_format.kind is not None:
        return _search_typed(W, H, zeta, grid_format.kind)
    parts = W.reshape(H.shape[0], -1, W.shape[-1])  # rows that share a Hessian
    searched = []
    for h, part in enumerate(parts):  # one by one: the blocks of H take as much memory as H
        blocks = _blocks(H[h], zeta, grid_format.group_size)
        V = _split(part / zeta, grid_format.group_size)
        searched.append(_search(V, blocks, grid_format, effort))
    scale, zero_point, losses = (torch.cat(x) for x in zip(*searched, strict=True))
    shape = (*W.shape[:2], -1)
    grid = Grid(scale.view(shape), zero_point.view(shape), zeta, grid_format.bits)
    if grid_format.group_size is not None:  # H couples the groups, which were searched alone
        losses = reconstruction_loss(dequantize(quantize(W, grid), grid) - W, H)
    return grid, losses.sum()


def _search_typed(W: Tensor, H: Tensor, zeta: Tensor, kind: GridType) -> tuple[Grid, Tensor]:
    """Return the fit of a block type, each group on its own diagonal block of H, and the loss of W."""
    V = _split(W / zeta, kind.group)  # [heads, rows, groups, columns]
    parts = V.reshape(H.shape[0], -1, *V.shape[2:])
    fitted = [
        fit_factors(part.transpose(0, 1).contiguous(), _blocks(H[h], zeta, kind.group), kind)
        for h, part in enumerate(parts)
    ]
    rows = fitted[0].merged(lambda *same: torch.cat(same, 1), *fitted[1:])
    grid = Grid.of(rows.merged(lambda x: x.view(*W.shape[:2], -1)), zeta)
    losses = reconstruction_loss(dequantize(quantize(W, grid), grid) - W, H)
    return grid, losses.sum()


def _split(V: Tensor, group_size: int | None) -> Tensor:
    """Return ``[..., d_in]`` as ``[..., groups, columns]``."""
    return V.reshape(*V.shape[:-1], -1, group_size or V.shape[-1])


def _blocks(H: Tensor, zeta: Tensor, group_size: int | None) -> Tensor:
    """Return the diagonal blocks ``[groups, columns, columns]`` of H, as weights over zeta meet it."""
    size = group_size or len(H)
    blocks = (zeta[:, None] * H).mul_(zeta).view(-1, size, len(H) // size, size)
    return blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0).contiguous()


def _range(V: Tensor, grid_format: GridFormat) -> tuple[Tensor, Tensor]:
    """Return scale and (not yet rounded) zero point of the min-max range."""
    largest = grid_format.largest
    low, high = min_max_range(V, symmetric=grid_format.symmetric)
    scale = (high - low) / largest
    if grid_format.symmetric:
        return scale, torch.full_like(scale, 2 ** (grid_format.bits - 1))
    return scale, (-low / scale).clamp(max=largest)  # the quotient may be a rounding error above


def _search(V: Tensor, H: Tensor, grid_format: GridFormat, effort: Effort) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best scales, zero points and losses ``[rows, groups]`` for ``V [rows, groups, columns]``."""
    scale, zero_point = _range(V, grid_format)
    ratios = torch.arange(CLIP_RATIOS, 0, -1, dtype=V.dtype, device=V.device) / CLIP_RATIOS
    zero_points = torch.stack([zero_point.floor(), zero_point.ceil()], -1)  # [rows, groups, 2]
    if bool((zero_points[..., 0] == zero_points[..., 1]).all()):  # symmetric: half the work
        zero_points = zero_points[..., :1]
    V = V.transpose(0, 1).contiguous()  # [groups, rows, columns]; products would copy it otherwise
    candidates = Candidates(
        (scale.T.contiguous()[..., None] * ratios).repeat(1, 1, zero_points.shape[-1]),
        zero_points.transpose(0, 1).contiguous().repeat_interleave(CLIP_RATIOS, -1),
        grid_format.largest,
    )
    scale, zero_point, loss = best_grids(V, H, candidates, effort=effort)
    return scale.T, zero_point.T, loss.T
