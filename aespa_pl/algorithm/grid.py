"""Scale and zero point of each row: a search over clip ratios for the least ``dw H dw^T``."""

import torch
from jaxtyping import Float
from torch import Tensor

from aespa_pl.algorithm.hessian import HeadMatrices
from aespa_pl.algorithm.quantizer import Grid
from aespa_pl.algorithm.workspace import chunk_elements

CLIP_RATIOS = 100
"""Ratios 1.00, 0.99 ... 0.01 of the min-max range (algorithm.md)."""
CPU_CHUNK = 2**18
"""Candidate weights at once, for each thread; 2**14 to 2**22 were tried."""
ACCELERATOR_CHUNK = 2**26
"""Candidate weights at once: 256 MB a tensor."""


def min_max_grid(
    W: Float[Tensor, "heads rows d_in"],
    zeta: Float[Tensor, " d_in"],
    *,
    bits: int,
    symmetric: bool,
    group_size: int | None,
) -> Grid:
    """Return the grid from the smallest to the largest weight of each row (and group of columns)."""
    scale, zero_point = _range(_split(W / zeta, group_size), bits, symmetric=symmetric)
    return Grid(scale, zero_point.round(), zeta, bits)


def search_grid(
    W: Float[Tensor, "heads rows d_in"],
    H: Float[Tensor, "#heads d_in d_in"] | HeadMatrices,
    zeta: Float[Tensor, " d_in"],
    *,
    bits: int,
    symmetric: bool,
    group_size: int | None,
) -> Grid:
    """Return the grid with the least ``dw H dw^T`` for each row under nearest rounding.

    Every clip ratio is tried with the floor and the ceiling of the zero point. With groups of
    columns each group is searched on its own diagonal block of H.
    """
    if H.shape[0] > 1:  # one head at a time: what is made of H takes as much memory as H
        grids = [
            search_grid(
                W[head : head + 1],
                H[head : head + 1],
                zeta,
                bits=bits,
                symmetric=symmetric,
                group_size=group_size,
            )
            for head in range(H.shape[0])
        ]
        scale = torch.cat([grid.scale for grid in grids])
        return Grid(scale, torch.cat([grid.zero_point for grid in grids]), zeta, bits)
    V = _split(W / zeta, group_size)  # [heads, rows, groups, columns]
    groups, columns = V.shape[2:]
    scaled = (
        (zeta[:, None] * H[:] * zeta)
        .unflatten(-1, (groups, columns))
        .unflatten(-3, (groups, columns))
    )
    blocks = scaled.diagonal(dim1=-4, dim2=-2).movedim(-1, 1)  # [#heads, groups, columns, columns]
    scale, zero_point = _range(V, bits, symmetric=symmetric)
    best_scale, best_zero = _search(
        V.transpose(1, 2), blocks, scale.transpose(1, 2), zero_point.transpose(1, 2), bits
    )
    return Grid(best_scale.transpose(1, 2), best_zero.transpose(1, 2), zeta, bits)


def _split(V: Tensor, group_size: int | None) -> Tensor:
    """``[heads, rows, d_in]`` to ``[heads, rows, groups, columns]``."""
    size = group_size or V.shape[-1]
    return V.view(*V.shape[:-1], -1, size)


def _range(V: Tensor, bits: int, *, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Return scale and (not yet rounded) zero point of the min-max range, which contains 0."""
    levels = 2**bits - 1
    low, high = V.amin(-1).clamp(max=0), V.amax(-1).clamp(min=0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    empty = (low == 0) & (high == 0)  # a row of zeros: any range does
    low, high = torch.where(empty, -1, low), torch.where(empty, 1, high)
    scale = (high - low) / levels
    if symmetric:
        return scale, torch.full_like(scale, 2 ** (bits - 1))
    return scale, (-low / scale).clamp(max=levels)  # the quotient may be a rounding error above


def _search(
    V: Tensor, H: Tensor, scale: Tensor, zero_point: Tensor, bits: int
) -> tuple[Tensor, Tensor]:
    """Return the best of all candidates for ``V [heads, groups, rows, columns]``."""
    ratios = torch.arange(CLIP_RATIOS, 0, -1, dtype=V.dtype, device=V.device) / CLIP_RATIOS
    zero_points = torch.stack([zero_point.floor(), zero_point.ceil()])
    if bool((zero_points[0] == zero_points[1]).all()):  # symmetric: one zero point, half the work
        zero_points = zero_points[:1]
    best_loss = torch.full_like(scale, torch.inf)
    best_scale, best_zero = scale.clone(), zero_points[0].clone()
    elements = chunk_elements(V, cpu=CPU_CHUNK, accelerator=ACCELERATOR_CHUNK)
    size = max(1, elements // V.numel())
    for zero in zero_points:
        for chunk in ratios.split(size):
            candidates = scale[:, :, None] * chunk[:, None]  # [heads, groups, candidates, rows]
            loss, index = _losses(V, H, candidates, zero, bits).min(2)
            better = loss < best_loss
            best_loss = torch.where(better, loss, best_loss)
            chosen = candidates.gather(2, index[:, :, None])[:, :, 0]
            best_scale = torch.where(better, chosen, best_scale)
            best_zero = torch.where(better, zero, best_zero)
    return best_scale, best_zero


def _losses(V: Tensor, H: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Return ``dv H dv^T`` for ``scale [heads, groups, candidates, rows]``, in its shape."""
    step, shift = scale[..., None], zero[:, :, None, :, None]
    V = V[:, :, None]  # [heads, groups, 1, rows, columns]
    error = V / step
    error = error.round_().add_(shift).clamp_(0, 2**bits - 1).sub_(shift).mul_(step).sub_(V)
    flat = error.flatten(2, 3)  # candidates and rows side by side: one product a head and group
    if H.shape[0] == 1 and flat.shape[0] > 1:
        H = H.expand(flat.shape[0], -1, -1, -1)
    return (flat * (flat @ H)).sum(-1).view(scale.shape)
