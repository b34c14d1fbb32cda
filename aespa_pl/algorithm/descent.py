"""Run coordinate descent on the integers themselves: each moves to its best value, the others fixed.

With ``dW = step (q - zero) - W`` and ``P = G dW H``, changing integer ``q_ij`` by m changes the
objective ``tr(G dW H dW^T)`` by ``2 m s_ij P_ij + m^2 s_ij^2 G_ii H_jj`` and P by
``m s_ij G[:, i] H[j, :]``. So the best integer is ``q_ij + round(-P_ij / (G_ii H_jj s_ij))``, clipped.
Rounding takes a half to 0 and clipping makes a move smaller, so a move that is not 0 always lowers
the objective. The descent nears a minimum of each integer alone, and ends where a pass gains little.

Source: coordinate descent on the integer least-squares problem that rounding is (closest vector
problem; Eq. 17, 21 and 22 of the paper are its quadratic forms). Tiles of columns are an idea of OPTQ's.

Here a *unit* is what can be minimized alone: a row, or a head where G couples its rows or its H is its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from aespa_pl.algorithm.objectives import keep_better, reconstruction_loss
from aespa_pl.algorithm.quantizer import Grid, dequantize
from aespa_pl.algorithm.replay import Replayed
from aespa_pl.algorithm.threads import one_thread
from aespa_pl.algorithm.tile import (
    Tile,
    add_times,
    find_coupled_moves,
    find_moves,
    moving,
    settled_coupled_moves,
    settled_moves,
    times,
)

COLUMNS = 64
"""Columns of a tile, whose moves are found together and reach the other columns with one product."""
COUPLED_ROWS, COUPLED_COLUMNS = 8, 32
"""Rows and columns of a tile with G. A larger one takes fewer calls, and more rounds to settle."""
ONE_THREAD = 2**20
"""Numbers of a tile's rows with G up to which the CPU's other threads take longer to wake than they save."""
LEAST_GAIN = 5e-3
"""Share of its loss that a unit must gain in a pass, or the pass was its last."""


@dataclass(frozen=True)
class Descent:
    """Holds the result of a descent."""

    integers: Real[Tensor, "heads rows d_in"]
    passes: Int[Tensor, " heads"]
    """Number of passes over all columns that the unit with the most passes took."""
    loss_before: Float[Tensor, "heads separable"]
    """Objective of the integers that it began with, in its independent parts."""


def descend(
    integers: Real[Tensor, "heads rows d_in"],
    W: Float[Tensor, "heads rows d_in"],
    grid: Grid,
    H: Float[Tensor, "#heads d_in d_in"],
    G: Float[Tensor, "heads rows rows"] | None = None,
    *,
    passes: int,
    heads_alone: bool = False,
) -> Descent:
    """Visit all integers, again and again, and move each to its best value.

    The weights are visited tile by tile, first along the columns, and row by row within a tile. Where
    the objective ended higher all the same (in a row, with G in a head), because float32 is not exact, the
    integers stay as they were.

    Args:
        integers: To begin with, of any type; the result is of the same.
        W: Original weights.
        grid: Grid of the projection.
        H: Damped Hessian.
        G: Second moment of the other side (query and key projections), or None.
        passes: Visits of an integer at most.
        heads_alone: A head's rows end together even where H is the only one: that of one head of several.
    """
    small = G is not None and len(W) * COUPLED_ROWS * W.shape[-1] <= ONE_THREAD
    with one_thread(where=small and W.device.type == "cpu"):
        return _descend(integers, W, grid, H, G, passes=passes, heads_alone=heads_alone)


def _descend(
    integers: Real[Tensor, "heads rows d_in"],
    W: Float[Tensor, "heads rows d_in"],
    grid: Grid,
    H: Float[Tensor, "#heads d_in d_in"],
    G: Float[Tensor, "heads rows rows"] | None,
    *,
    passes: int,
    heads_alone: bool,
) -> Descent:
    dW, step = dequantize(integers, grid) - W, grid.step()
    curvature = H.diagonal(dim1=1, dim2=2)[:, None]
    if G is not None:
        least = torch.finfo(G.dtype).tiny  # where G_ii is 0, so is P: nothing moves
        curvature = curvature * G.diagonal(dim1=1, dim2=2)[..., None].clamp(min=least)
    q, newton = integers.to(W.dtype, copy=True), -1 / (step * curvature)
    units = _Units(q, dW, step, newton, times(dW, H), H, G, grid.largest)
    if G is None and H.shape[0] == 1 and not heads_alone:
        units = units.rows_alone()
    before = units.loss()  # [units, separable]
    found, loss = units.integers.clone(), before.sum(-1)
    taken, left = torch.zeros_like(loss, dtype=torch.long), torch.arange(len(loss), device=W.device)
    for done in range(1, passes + 1):
        units.visit()
        found[left], taken[left] = units.integers, done
        now = units.loss().sum(-1)
        going = ((now < loss) & (now <= (1 - LEAST_GAIN) * loss)).nonzero()[:, 0]
        if not going.numel():
            break
        left, loss, units = left[going], now[going], units.some(going)
    current = found.view_as(integers)
    after = reconstruction_loss(dequantize(current, grid) - W, H, G)
    kept = keep_better(integers, before.view_as(after), current.to(integers.dtype), after)
    return Descent(kept, taken.view(len(W), -1).amax(-1), before.view_as(after))


@dataclass
class _Units:
    """Holds units under way; a visit changes integers, errors and R in place."""

    integers: Float[Tensor, "units rows d_in"]
    errors: Float[Tensor, "units rows d_in"]
    """``dW``."""
    step: Float[Tensor, "units rows d_in"]
    newton: Float[Tensor, "units rows d_in"]
    """What half the gradient with respect to ``dW`` is multiplied with for the best move, before rounding."""
    R: Float[Tensor, "units rows d_in"]
    """``dW H``."""
    H: Float[Tensor, "#units d_in d_in"]
    G: Float[Tensor, "units rows rows"] | None
    largest: int
    """The largest integer."""
    rounds: Replayed = field(default_factory=lambda: Replayed(settled_moves, "the polish"))
    coupled_rounds: Replayed = field(
        default_factory=lambda: Replayed(settled_coupled_moves, "the polish")
    )

    def rows_alone(self) -> "_Units":
        """Return the same weights with each row as a unit."""
        q, errors, step, newton, R = (x.flatten(0, 1)[:, None] for x in self._weights())
        return _Units(q, errors, step, newton, R, self.H, None, self.largest)

    def some(self, chosen: Int[Tensor, " some"]) -> "_Units":
        """Return some of the units, in their order."""
        if len(chosen) == len(self.errors):
            return self
        q, errors, step, newton, R = (x.index_select(0, chosen) for x in self._weights())
        H = self.H if len(self.H) == 1 else self.H[chosen]
        G = None if self.G is None else self.G[chosen]
        return _Units(q, errors, step, newton, R, H, G, self.largest)

    def _weights(self) -> tuple[Tensor, ...]:
        """Return the fields that have a number for each weight."""
        return self.integers, self.errors, self.step, self.newton, self.R

    def loss(self) -> Float[Tensor, "units separable"]:
        """Return the objective of each unit in its independent parts: rows, or with G the head."""
        if self.G is None:
            return (self.errors * self.R).sum(-1)
        return (self.errors * (self.G @ self.R)).sum(-1).sum(-1, keepdim=True)

    def visit(self) -> None:
        """Visit all integers once, in tiles of rows and columns."""
        if self.G is None:
            self._visit_independent_rows()
            return
        for rows in _slices(self.errors.shape[1], COUPLED_ROWS):
            self._visit_coupled_rows(rows, self.G)

    def _visit_independent_rows(self) -> None:
        for columns in _slices(self.H.shape[-1], COLUMNS):
            tile = self._tile(slice(None), columns, self.R[..., columns])
            moves = find_moves(tile, self.H[:, columns, columns].triu(1), self.rounds)
            few = None  # units that move; an accelerator would make the host wait for them
            if moves.device.type == "cpu":
                few = moving(moves)
                if not few.numel():
                    continue
            delta = self._move(slice(None), columns, moves)
            if few is None or 2 * len(few) > len(delta) or len(self.H) > 1:
                add_times(self.R, delta, self.H[:, columns])
            else:  # most units are still
                R = self.R.index_select(0, few)
                add_times(R, delta.index_select(0, few), self.H[:, columns])
                self.R.index_copy_(0, few, R)

    def _visit_coupled_rows(self, rows: slice, G: Float[Tensor, "units rows rows"]) -> None:
        """Visit a few rows of each head, with tensors so small that the number of calls counts."""
        R, P, G = self.R[:, rows], G[:, rows] @ self.R, G[:, rows, rows]
        own, below = G.diagonal(dim1=1, dim2=2)[..., None], G.tril(-1)
        for columns in _slices(self.H.shape[-1], COUPLED_COLUMNS):
            tile = self._tile(rows, columns, P[..., columns])
            H = self.H[0, columns, columns]
            both = torch.cat([H, H.triu(1)], -1)
            moves = find_coupled_moves(tile, both, own, below, self.coupled_rounds)
            change = times(self._move(rows, columns, moves), self.H[:, columns])
            R += change
            P.baddbmm_(G, change)  # all columns: a part of them would be one call a head

    def _tile(self, rows: slice, columns: slice, P: Tensor) -> Tile:
        here = (slice(None), rows, columns)
        q = self.integers[here]
        return Tile(P, self.step[here], self.newton[here], -q, self.largest - q)

    def _move(self, rows: slice, columns: slice, moves: Tensor) -> Tensor:
        """Change a tile's integers and errors; return the change of its weights."""
        here = (slice(None), rows, columns)
        q, errors, delta = self.integers[here], self.errors[here], moves * self.step[here]
        q += moves
        errors += delta
        return delta


def _slices(size: int, step: int) -> Iterator[slice]:
    """Yield slices of ``step`` indices that together have all of them."""
    return (slice(start, start + step) for start in range(0, size, step))
