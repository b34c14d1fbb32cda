"""Fit the numbers of a block type to the weights of each group of columns, for a small ``dw H dw^T``.

A group of a row has the weights v, integers q (less the type's zero point) and its own diagonal block of H.
The loss of ``S q - M`` is a parabola of S and M, whose lowest point is the least-squares fit. Several starts
give several q; the fit with the least loss is taken, and rounded to the numbers that the type stores. Types
with a fixed zero point have M = 0.

Source of the starts: ``make_qx_quants`` and ``make_qkx2_quants`` in ``ggml-quants.c`` of llama.cpp, which
fit with a weight for each column where this has H.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from aespa_pl.algorithm.candidates import ACCELERATOR_CHUNK
from aespa_pl.algorithm.grid_types import Factors, GridType, round_to_half
from aespa_pl.algorithm.workspace import chunk_elements

STARTS = [k / 5 for k in range(-4, 5)]
"""What the largest integer is taken for less or more in each start, where there are minimums."""
SIGNED_STARTS = [k / 5 for k in range(-8, 9)]
"""The same for a fixed zero point, whose largest weight meets the integer farthest from it."""
CPU_CHUNK = 2**18
"""Weights of a block type that a thread fits at once; all at once take up to twice as long."""
TINY = 1e-30
"""Least divisor: below it all weights of a group are 0."""
SINGULAR = 1e-6
"""Least determinant beside ``A C``, below which x and y are too much alike for a scale and a minimum."""


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
    losses = _Losses(V, H, kind)
    best = torch.full_like(V[..., 0], torch.inf)
    scale, minimum = torch.ones_like(best), torch.zeros_like(best)
    for start in _starts(V, kind):
        parabola = losses.of_nearest(*start)
        S, M = parabola.lowest()
        # where c is stored a minimum is at least 0, so that all groups of a block can have theirs
        usable = (S >= 0) & ((M > 0) | (kind.minimums == (1, 1))) & (kind.zero_point is None)
        S, M = torch.where(usable, S, parabola.lowest_scale()), torch.where(usable, M, 0)
        loss = parabola.at(S, M)
        better = loss < best
        best, scale, minimum = (
            torch.where(better, *pair) for pair in ((loss, best), (S, scale), (M, minimum))
        )
    return _rounded(losses.of_nearest(scale, minimum), scale, minimum, kind)


class _Losses:
    """Computes the losses of a few rows, in memory that all starts share."""

    def __init__(self, V: Tensor, H: Tensor, kind: GridType) -> None:
        self.V, self.H, self.kind = V, H, kind
        self.VH = V @ H
        self.q, self.qH = torch.empty_like(V), torch.empty_like(V)
        self.C = self.E = torch.zeros_like(V[..., 0])  # for the minimum 0 that a fixed zero point leaves
        if kind.zero_point is None:
            self.C, self.E = H.sum((1, 2))[:, None].expand(self.E.shape), self.VH.sum(-1)

    def of_nearest(self, scale: Tensor, minimum: Tensor) -> Parabola:
        """Return the losses ``[groups, rows]`` of the integers that are nearest."""
        step = torch.where(scale.abs() < TINY, TINY, scale)[..., None]
        has_minimum = self.kind.zero_point is None
        above = torch.add(self.V, minimum[..., None], out=self.q) if has_minimum else self.V
        q = self.kind.nearest_(torch.div(above, step, out=self.q))
        qH = torch.bmm(q, self.H, out=self.qH)
        B = qH.sum(-1) if has_minimum else torch.zeros_like(scale)
        A = qH.mul_(q).sum(-1)
        D = torch.mul(self.VH, q, out=qH).sum(-1)
        return Parabola(A, B, self.C, D, self.E)


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
