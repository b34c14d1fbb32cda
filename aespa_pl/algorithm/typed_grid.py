"""Find the scale and minimum of each group of a block type, and round them to the numbers that it stores.

A group of a row has the weights v, integers q (less the type's zero point) and the group's own diagonal block
of H. The loss of ``S q - M`` is a parabola of S and M, whose lowest point is the least-squares fit. Several
starts give several q; the fit with the least loss is taken. Types with a fixed zero point have M = 0.

Source of the starts: ``make_qx_quants`` and ``make_qkx2_quants`` in ``ggml-quants.c`` of llama.cpp, which
fit with a weight for each column where this has H.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from aespa_pl.algorithm.grid_types import Factors, GridType, round_to_half

STARTS = [k / 5 for k in range(-4, 5)]
"""What the largest integer is taken for less or more in each start, where there are minimums."""
SIGNED_STARTS = [k / 5 for k in range(-8, 9)]
"""The same for a fixed zero point, whose largest weight meets the integer farthest from it."""
TINY = 1e-30
"""Least divisor: below it all weights of a group are 0."""
SINGULAR = 1e-6
"""Least determinant beside ``A C``, below which x and y are too much alike for a scale and a minimum."""


@dataclass(frozen=True)
class Parabola:
    """Holds the loss of each group as a function of its scale S and its minimum M.

    It is ``A S^2 - 2 B S M + C M^2 - 2 D S + 2 E M``, less the constant ``v H v``. The group's weights are
    ``S x - M y``, so with its weights v and its Hessian H the numbers are ``A = x H x``, ``B = x H y``,
    ``C = y H y``, ``D = x H v`` and ``E = y H v``.
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
        """Return scale and minimum of the lowest point; where there is no single one the minimum is 0."""
        determinant = self.A * self.C - self.B.square()
        scale = (self.C * self.D - self.B * self.E) / determinant.clamp(min=TINY)
        single = determinant > SINGULAR * self.A * self.C
        scale = torch.where(single, scale, self.lowest_scale())
        return scale, torch.where(single, self.lowest_minimum(scale), 0)


def fit_factors(
    V: Float[Tensor, "groups rows columns"], H: Float[Tensor, "groups columns columns"], kind: GridType
) -> Factors:
    """Return the numbers of a block type with nearly the least loss of each group under nearest rounding.

    V is the weights over zeta. The last block of a row may be incomplete.
    """
    VH = V @ H
    best = torch.full_like(VH[..., 0], torch.inf)
    scale, minimum = torch.ones_like(best), torch.zeros_like(best)
    for start in _starts(V, kind):
        parabola = _parabola(_nearest(V, *start, kind), VH, H)
        fitted = _lowest(parabola, kind)
        loss = parabola.at(*fitted)
        better = loss < best
        best, scale, minimum = (
            torch.where(better, *pair) for pair in ((loss, best), (fitted[0], scale), (fitted[1], minimum))
        )
    parabola = _parabola(_nearest(V, scale, minimum, kind), VH, H)
    return _rounded(parabola, scale, minimum, kind)


def _parabola(q: Tensor, VH: Tensor, H: Tensor) -> Parabola:
    """Return the losses ``[groups, rows]`` of integers, given ``V H``."""
    qH = q @ H
    C = H.sum((1, 2))[:, None].expand(qH.shape[:2])
    return Parabola((qH * q).sum(-1), qH.sum(-1), C, (VH * q).sum(-1), VH.sum(-1))


def _lowest(parabola: Parabola, kind: GridType) -> tuple[Tensor, Tensor]:
    """Return scale and minimum of the lowest point that the type has.

    Where c is stored a minimum is at least 0, so that all groups of a block can have theirs.
    """
    scale, minimum = parabola.lowest()
    usable = (scale > 0) & ((minimum > 0) | (kind.minimums == (1, 1))) & (kind.zero_point is None)
    return torch.where(usable, scale, parabola.lowest_scale()), torch.where(usable, minimum, 0)


def _starts(V: Tensor, kind: GridType) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scales and minimums to start from."""
    if kind.zero_point is None:
        low, high = V.amin(-1).clamp(max=0), V.amax(-1).clamp(min=0)
        yield from (((high - low) / (kind.largest + x), -low) for x in STARTS)
    else:
        largest = V.gather(-1, V.abs().argmax(-1, keepdim=True))[..., 0]
        none = torch.zeros_like(largest)
        farthest = max(kind.zero_point, kind.largest - kind.zero_point)
        sign = -1 if kind.zero_point == farthest else 1
        yield from ((sign * largest / (farthest + x), none) for x in SIGNED_STARTS)


def _nearest(V: Tensor, scale: Tensor, minimum: Tensor, kind: GridType) -> Tensor:
    """Return the nearest integers, less the fixed zero point, ``[groups, rows, columns]``."""
    zero = kind.offset
    steps = (V + minimum[..., None]) / torch.where(scale == 0, TINY, scale)[..., None]
    return steps.round_().clamp_(-zero, kind.largest - zero)


def _rounded(parabola: Parabola, scale: Tensor, minimum: Tensor, kind: GridType) -> Factors:
    """Return factors near scales and minimums ``[groups, rows]``, where that costs least.

    The minimum follows the scale that is rounded before it.
    """
    A, B, C = (x.T[None] for x in (parabola.A, parabola.B, parabola.C))
    scale, minimum = scale.T[None], minimum.T[None]  # [1, rows, groups]
    slope = (B / C.clamp(min=TINY)) * (kind.zero_point is None)
    d, a = _split(scale, A - slope * B, kind.scales, kind)
    a = torch.where(a == 0, 1, a)
    minimum = minimum + slope * (kind.each_group(d, a.shape[-1]) * a - scale)
    return Factors(kind, d, a, *_split(minimum, C, kind.minimums, kind))


def _split(
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
