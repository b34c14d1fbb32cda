"""Move scales and minimums of a block type to better values under the whole H, with the integers fixed.

With ``dW = zeta (S q - M) - W`` and ``P = G dW H``, changing scale and minimum of one group by dS and dM
moves its weights by ``dS x - dM y`` with ``x = zeta q`` and ``y = zeta``, and the objective
``tr(G dW H dW^T)`` by a parabola of dS and dM:

    G_ii (x H x dS^2 - 2 x H y dS dM + y H y dM^2) + 2 P x dS - 2 P y dM

where all products run over the group's columns. The integers a and c of a group become the best ones: every a
is tried with the c that is best beside it; where there is no c, the lowest point says a. For d and d_min of a
block x is ``zeta a q`` and y is ``zeta c``; they become the float16 numbers nearest to the lowest point.
Groups and blocks are visited in turn, and rows that G couples one after the other, as in a coordinate
descent. In a large head some move at once: among them the sums of ``|G|`` stand for it on the diagonal, with
which no error counts less, and the loss cannot rise.
"""

from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from jaxtyping import Float, Real
from torch import Tensor

from aespa_pl.algorithm.factors import Parabola
from aespa_pl.algorithm.grid import min_max_grid
from aespa_pl.algorithm.grid_types import Factors, GridType, TypedWeight, round_to_half
from aespa_pl.algorithm.objectives import error_product, loss_of
from aespa_pl.algorithm.quantizer import Grid, GridFormat, dequantize, quantize
from aespa_pl.algorithm.tile import LARGE_HEAD, times

COUPLED_ROWS = 16
"""Rows of a large head that G couples and that move at once."""
AHEAD = 128
"""Columns whose moves reach the others with one product."""
REFITS = 2
"""Times that the grid of a matrix without statistics is fitted to the integers, and these rounded again."""


def rounded_rows(W: Float[Tensor, "rows d_in"], kind: GridType) -> TypedWeight:
    """Return a matrix without statistics of its inputs, such as an embedding, in a type that holds its rows.

    Each row is rounded by its own least squares. A row of an embedding has scales of its own, so how often
    its token occurs changes nothing.
    """
    values = W.reshape(1, -1, kind.block).float()  # blocks don't depend on each other
    H = torch.eye(kind.block, device=W.device)[None]
    zeta, factor = torch.ones_like(values[0, 0]), torch.ones_like(values[..., 0])
    grid: Grid = min_max_grid(values, zeta, GridFormat.of(kind)).in_half(factor)
    q = quantize(values, grid)
    for _ in range(REFITS):
        grid, _ = refit(q, values, grid, H, row_factor=factor)
        q = quantize(values, grid)
    if grid.factors is None:
        raise ValueError(f"{kind.name} makes no grid")
    stored = grid.factors.stored(q[0].to(torch.uint8))
    return TypedWeight(**{n: x.reshape(len(W), -1) for n, x in stored.tensors().items()}, kind=kind)


def refit(
    integers: Real[Tensor, "heads rows d_in"],
    W: Float[Tensor, "heads rows d_in"],
    grid: Grid,
    H: Float[Tensor, "#heads d_in d_in"],
    G: Float[Tensor, "heads rows rows"] | None = None,
    *,
    row_factor: Float[Tensor, "heads rows"],
) -> tuple[Grid, Float[Tensor, "heads separable"]]:
    """Return a grid of the same type on which the integers, which stay, lose less or as much; and the loss.

    H is damped. The ``row_factor`` is what d and d_min of each row are stored with. A uniform grid has
    nothing to fit, and raises ValueError.
    """
    factors = grid.factors
    if factors is None:
        raise ValueError("a uniform grid has no sub-scales to fit")
    dW, coupled = dequantize(integers, grid) - W, G is not None
    R = error_product(dW, H)
    before = loss_of(dW, R if G is None else G @ R, coupled=coupled)
    del dW
    found = factors.merged(torch.clone)
    # integers of a byte have no negative numbers
    x = (integers.to(W.dtype) - factors.kind.offset) * grid.zeta
    if G is None:
        one = torch.ones_like(R[..., :1])
        _Rows(found, x, grid.zeta, H, one, R, row_factor[..., None]).visit(R)
    else:
        count = COUPLED_ROWS if W.shape[1] > LARGE_HEAD else 1
        for first in range(0, W.shape[1], count):
            some = slice(first, first + count)
            own = found.merged(itemgetter((slice(None), some)))  # views
            P, factor = G[:, some] @ R, row_factor[:, some, None]
            bound = G[:, some, some].abs().sum(-1, keepdim=True)
            _Rows(own, x[:, some], grid.zeta, H, bound, P, factor).visit(R[:, some])
    moved = Grid.of(found, grid.zeta)
    dW = dequantize(integers, moved) - W
    after = loss_of(dW, R if G is None else G @ R, coupled=coupled)
    better = after < before
    found = found.merged(lambda x, y: torch.where(better[..., None], x, y), factors)
    return Grid.of(found, grid.zeta), torch.where(better, after, before)


@dataclass(frozen=True)
class _Rows:
    """Holds rows that don't depend on each other, or some of their columns; factors and P change in place."""

    factors: Factors
    x: Float[Tensor, "heads rows columns"]
    """``zeta q``."""
    zeta: Float[Tensor, " columns"]
    H: Float[Tensor, "#heads columns columns"]
    g: Float[Tensor, "heads rows 1"]
    """Diagonal of a matrix that is nowhere less than G."""
    P: Float[Tensor, "heads rows columns"]
    """``G dW H``; ``dW H`` itself where there is no G."""
    row_factor: Float[Tensor, "heads rows 1"]

    def visit(self, R: Float[Tensor, "heads rows columns"]) -> None:
        """Visit some columns after the other; their moves reach all others, in ``R = dW H``, together."""
        d_in, block = self.x.shape[-1], self.factors.kind.block
        size = max(AHEAD // block, 1) * block
        for first in range(0, d_in, size):
            columns = slice(first, min(first + size, d_in))
            change = times(self.of(columns).moves(), self.H[:, columns])
            R.add_(change)
            if self.P is not R:
                self.P.addcmul_(self.g, change)

    def of(self, columns: slice) -> "_Rows":
        """Return these columns, which are whole blocks, with a P of their own."""
        f = self.factors
        group, block = (
            slice(columns.start // n, -(-columns.stop // n)) for n in (f.kind.group, f.kind.block)
        )
        return replace(
            self,
            factors=Factors(f.kind, f.d[..., block], f.a[..., group], f.d_min[..., block], f.c[..., group]),
            x=self.x[..., columns],
            zeta=self.zeta[columns],
            H=self.H[:, columns, columns],
            P=self.P[..., columns].clone(),
        )

    def moves(self) -> Float[Tensor, "heads rows columns"]:
        """Visit each group of each block, and the block after its groups; return the moves of weights."""
        kind, columns = self.factors.kind, self.x.shape[-1]
        moves = torch.zeros_like(self.x)
        for block, start in enumerate(range(0, columns, kind.block)):
            stop = min(start + kind.block, columns)
            if kind.has_integers:  # otherwise a group has nothing of its own
                for first in range(start, stop, kind.group):
                    self._move_group(slice(first, first + kind.group), block, first // kind.group, moves)
            self._move_block(slice(start, stop), block, moves)
        return moves

    def _move_group(self, columns: slice, block: int, group: int, moves: Tensor) -> None:
        f, y = self.factors, self.zeta[columns].expand_as(self.x[..., columns])
        a, c = f.a[..., group, None], f.c[..., group, None]
        d, d_min = f.d[..., block, None], f.d_min[..., block, None]
        change = self._change(self.x[..., columns], y, columns)
        if f.kind.minimums == (0, 0):
            best = _nearest_integer(a + change.lowest_scale() / d, f.kind.scales).where(d != 0, a)
            self._move(columns, (best - a) * d * self.x[..., columns], moves)
            f.a[..., group, None] = best
            return
        tried = torch.arange(f.kind.scales[0], f.kind.scales[1] + 1, device=a.device)
        tried = tried[tried != 0].to(a.dtype)
        dS = (tried - a) * d
        beside = (c + change.lowest_minimum(dS) / d_min).round_().clamp_(*f.kind.minimums)
        best = change.at(dS, (beside - c) * d_min).argmin(-1, keepdim=True)
        dS, beside = dS.gather(-1, best), beside.gather(-1, best)
        self._move(columns, dS * self.x[..., columns] - (beside - c) * d_min * y, moves)
        f.a[..., group, None] = tried[best]
        f.c[..., group, None] = beside

    def _move_block(self, columns: slice, block: int, moves: Tensor) -> None:
        f, size = self.factors, self.factors.kind.group
        groups = slice(columns.start // size, columns.stop // size)
        a, c = (value[..., groups].repeat_interleave(size, -1) for value in (f.a, f.c))
        x, y = a * self.x[..., columns], c * self.zeta[columns]
        d, d_min = f.d[..., block, None], f.d_min[..., block, None]
        change = self._change(x, y, columns)
        dS = round_to_half((d + change.lowest()[0]) * self.row_factor) / self.row_factor - d
        dM = round_to_half((d_min + change.lowest_minimum(dS)) * self.row_factor) / self.row_factor - d_min
        lower = change.at(dS, dM) < 0
        dS, dM = torch.where(lower, dS, 0), torch.where(lower, dM, 0)
        self._move(columns, dS * x - dM * y, moves)
        d += dS  # these are views
        d_min += dM

    def _change(self, x: Tensor, y: Tensor, columns: slice) -> Parabola:
        """Return how moves along x and y change the objective, for each row ``[heads, rows, 1]``."""
        H, P = self.H[:, columns, columns], self.P[..., columns]
        xH = times(x, H)
        of_x = (self.g * (xH * x)).sum(-1, keepdim=True), (-P * x).sum(-1, keepdim=True)
        if self.factors.kind.minimums == (0, 0):
            none = torch.zeros_like(of_x[0])
            return Parabola(of_x[0], none, none, of_x[1], none)
        products = self.g * (xH * y), self.g * (times(y, H) * y), -P * y
        B, C, E = (product.sum(-1, keepdim=True) for product in products)
        return Parabola(of_x[0], B, C, of_x[1], E)

    def _move(self, columns: slice, delta: Tensor, moves: Tensor) -> None:
        moves[..., columns] += delta
        self.P.addcmul_(self.g, times(delta, self.H[:, columns]))


def _nearest_integer(value: Tensor, bounds: tuple[int, int]) -> Tensor:
    """Return the integer within bounds that is nearest to a value, and is not 0."""
    nearest = value.round().clamp(*bounds)
    beside_0 = torch.where(value < 0, -1, 1).clamp(*bounds).to(value.dtype)
    return torch.where(nearest == 0, beside_0, nearest)
