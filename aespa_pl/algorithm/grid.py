"""Find the grid of each row, or of each of its groups of columns, for a small ``dw H dw^T``.

Scale and zero point of a uniform grid are searched over clip ratios. Scale and minimum of a block type are
fitted and rounded to the numbers that it stores: a group of a row has the weights v, integers q (less the
type's zero point) and its own diagonal block of H. The loss of ``S q - M`` is a parabola of S and M, whose
lowest point is the least-squares fit. Several starts give several q; the fit with the least loss is taken.
Types with a fixed zero point have M = 0.

Source of the starts: ``make_qx_quants`` and ``make_qkx2_quants`` in ``ggml-quants.c`` of llama.cpp, which
fit with a weight for each column where this has H.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from aespa_pl.algorithm.candidates import (
    ACCELERATOR_CHUNK,
    THOROUGH,
    Candidates,
    Effort,
    best_grids,
    best_weighted,
)
from aespa_pl.algorithm.grid_types import Factors, GridType, nearest_to, round_to_half
from aespa_pl.algorithm.objectives import reconstruction_loss
from aespa_pl.algorithm.quantizer import Grid, GridFormat, dequantize, quantize
from aespa_pl.algorithm.workspace import chunk_elements

CLIP_RATIOS = 100
"""Ratios 1.00, 0.99 ... 0.01 of the min-max range (docs/algorithm.md)."""
MOST_GRIDS = 2**26
"""Candidates of rows and groups that are compared at once, which take about 25 bytes each."""
STARTS = [k / 5 for k in range(-4, 5)]
"""What the largest integer is taken for less or more in each start, where there are minimums."""
SIGNED_STARTS = [k / 5 for k in range(-8, 9)]
"""The same for a fixed zero point, whose largest weight meets the integer farthest from it."""
CPU_CHUNK = 2**19
"""Weights of a block type that a thread fits at once; all at once take up to twice as long."""
TINY = 1e-30
"""Least divisor: below it all weights of a group are 0."""
SINGULAR = 1e-6
"""Least determinant beside ``A C``, below which x and y are too much alike for a scale and a minimum."""


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


@dataclass(frozen=True)
class Parabola:
    """Holds the loss of each group as a function of its scale S and its minimum M.

    It is ``A S^2 - 2 B S M + C M^2 - 2 D S + 2 E M``, less the constant ``v H v``, for the weights v and ``S
    x - M y``: ``A = x H x``, ``B = x H y``, ``C = y H y``, ``D = x H v`` and ``E = y H v``.
    """

    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    E: Tensor

    def at(self, S: Tensor, M: Tensor) -> Tensor:
        """Return the loss."""
        return S * (self.A * S - 2 * self.B * M - 2 * self.D) + M * (self.C * M + 2 * self.E)

    def lowest_scale(self) -> Tensor:
        """Return the best scale beside the minimum 0."""
        return self.D / self.A.clamp(min=TINY)

    def lowest_minimum(self, S: Tensor) -> Tensor:
        """Return the best minimum beside a scale."""
        return (self.B * S - self.E) / self.C.clamp(min=TINY)

    def lowest(self) -> tuple[Tensor, Tensor]:
        """Return scale and minimum of the lowest point; where there is no single one, one of them is 0."""
        determinant = self.A * self.C - self.B.square()
        scale = (self.C * self.D - self.B * self.E) / determinant.clamp(min=TINY)
        single = determinant > SINGULAR * self.A * self.C
        scale = torch.where(single, scale, self.lowest_scale())
        return scale, torch.where(single | (self.A == 0), self.lowest_minimum(scale), 0)


def fit_factors(
    V: Float[Tensor, "groups rows columns"], H: Float[Tensor, "groups columns columns"], kind: GridType
) -> Factors:
    """Return the numbers of a block type, the least squares of each group's integers from the best start.

    V is the weights over zeta. Starts are compared by the loss of their own integers. Rounding these anew
    gives less under nearest rounding, and no less after the OPTQ update and the descent. The last block of a
    row may be incomplete. A few rows are fitted at once, in memory that stays in the cache.
    """
    chunk = chunk_elements(V, cpu=CPU_CHUNK, accelerator=ACCELERATOR_CHUNK)
    height = max(1, chunk // (V.shape[0] * V.shape[2]))
    fitted = [_fit_rows(rows.contiguous(), H, kind) for rows in V.split(height, 1)]
    return fitted[0].merged(lambda *same: torch.cat(same, 1), *fitted[1:])


def _fit_rows(V: Tensor, H: Tensor, kind: GridType) -> Factors:
    VH = V @ H
    best = torch.full_like(VH[..., 0], torch.inf)
    scale, minimum = torch.ones_like(best), torch.zeros_like(best)
    for start in _starts(V, kind):
        parabola = _parabola(V, start, VH, H, kind)
        S, M = parabola.lowest()
        # where c is stored a minimum is at least 0, so that all groups of a block can have theirs
        usable = (S >= 0) & ((M > 0) | (kind.minimums == (1, 1))) & (kind.zero_point is None)
        S, M = torch.where(usable, S, parabola.lowest_scale()), torch.where(usable, M, 0)
        loss = parabola.at(S, M)
        better = loss < best
        best, scale, minimum = (
            torch.where(better, *pair) for pair in ((loss, best), (S, scale), (M, minimum))
        )
    return _rounded(_parabola(V, (scale, minimum), VH, H, kind), scale, minimum, kind)


def _parabola(V: Tensor, grid: tuple[Tensor, Tensor], VH: Tensor, H: Tensor, kind: GridType) -> Parabola:
    """Return the losses ``[groups, rows]`` of the integers that are nearest for a scale and a minimum."""
    scale, minimum = grid
    steps = (V + minimum[..., None]) / torch.where(scale == 0, TINY, scale)[..., None]
    q = nearest_to(steps, (kind.offset, 0), kind.integers).sub_(kind.offset)
    qH = q @ H
    C = H.sum((1, 2))[:, None].expand(qH.shape[:2])
    return Parabola((qH * q).sum(-1), qH.sum(-1), C, (VH * q).sum(-1), VH.sum(-1))


def _starts(V: Tensor, kind: GridType) -> Iterator[tuple[Tensor, Tensor]]:
    if kind.zero_point is None:
        low, high = V.amin(-1), V.amax(-1)
        if kind.minimums != (1, 1):  # the minimum can't be negative
            low = low.clamp(max=0)
        yield from (((high - low) / (kind.largest + x), -low) for x in STARTS)
    else:
        largest = V.gather(-1, V.abs().argmax(-1, keepdim=True))[..., 0]
        none = torch.zeros_like(largest)
        farthest = max(kind.zero_point, kind.largest - kind.zero_point)
        sign = -1 if kind.zero_point == farthest else 1
        yield from ((sign * largest / (farthest + x * kind.distance), none) for x in SIGNED_STARTS)


def _rounded(parabola: Parabola, scale: Tensor, minimum: Tensor, kind: GridType) -> Factors:
    """Return factors near scales and minimums ``[groups, rows]``, where that costs least.

    The minimum follows the scale that is rounded before it, unless it is held at 0.
    """
    A, B, C = (x.T[None] for x in (parabola.A, parabola.B, parabola.C))
    scale, minimum = scale.T[None], minimum.T[None]  # [1, rows, groups]
    follows = ((minimum > 0) | (kind.minimums == (1, 1))) & (kind.zero_point is None)
    slope = (B / C.clamp(min=TINY)) * follows
    d, a = _factored(scale, A - slope * B, kind.scales, kind)
    a = torch.where(a == 0, 1, a)
    minimum = minimum + slope * (kind.each_group(d, a.shape[-1]) * a - scale)
    return Factors(kind, d, a, *_factored(minimum, C, kind.minimums, kind))


def _factored(
    value: Float[Tensor, "1 rows groups"], weight: Tensor, limits: tuple[int, int], kind: GridType
) -> tuple[Tensor, Tensor]:
    """Return a float16 factor of each block and integers of its groups, whose product is near a value.

    The largest value gets the largest integer; least squares then move the factor.
    """
    groups = value.shape[-1]
    value, weight = (pad(x, (0, -groups % kind.groups)) for x in (value, weight))
    value, weight = (x.unflatten(-1, (-1, kind.groups)) for x in (value, weight))
    extreme = value.gather(-1, value.abs().argmax(-1, keepdim=True))
    factor = round_to_half(extreme / (limits[0] if limits[0] < 0 else max(1, limits[1])))
    integer = (value / factor).round_().clamp_(*limits)
    products = (weight * integer * value).sum(-1, keepdim=True)
    fitted = products / (weight * integer.square()).sum(-1, keepdim=True)
    factor = round_to_half(torch.where(fitted.isfinite() & (fitted != 0), fitted, factor))
    integer = (value / factor).round_().clamp_(*limits)
    return factor[..., 0], integer.flatten(-2)[..., :groups]
