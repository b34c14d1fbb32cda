"""Run coordinate descent on the integers themselves: each moves to its best value, the others fixed.

With ``dW = step (q - zero) - W`` and ``P = G dW H``, changing integer ``q_ij`` by m changes the
objective ``tr(G dW H dW^T)`` by ``2 m s_ij P_ij + m^2 s_ij^2 G_ii H_jj`` and P by
``m s_ij G[:, i] H[j, :]``. So the best integer is the grid's nearest to ``q_ij - P_ij / (G_ii H_jj s_ij)``.
Rounding takes a half to 0 and clipping makes a move smaller, so a move that is not 0 always lowers
the objective. The descent nears a minimum of each integer alone, and ends where a pass gains little.

Source: coordinate descent on the integer least-squares problem that rounding is (closest vector
problem; Eq. 17, 21 and 22 of the paper are its quadratic forms). Tiles of columns are an idea of OPTQ's.

Here a *unit* is what can be minimized alone: a row, or a head where G couples its rows or its H is its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from aespa_pl.algorithm.objectives import keep_better, reconstruction_loss
from aespa_pl.algorithm.quantizer import Grid, dequantize
from aespa_pl.algorithm.tile import LARGE_HEAD, Tile, add_times, find_coupled_moves, find_moves, moving, times
from aespa_pl.algorithm.workspace import one_thread

COLUMNS = 64
"""Columns of a tile, whose moves are found together and reach the other columns with one product."""
COUPLED, COUPLED_LARGE = (8, 32), (64, 16)
"""Rows and columns of a tile with G, and of a large head: a larger one takes fewer calls, and more rounds to
settle, so that more moves wait for the next pass."""
AHEAD = 128
"""Columns whose ``G dW H`` is computed at once with G, and then kept up to date; moves reach the others
with one product."""
ONE_THREAD = 2**20
"""Numbers of a tile's rows with G up to which the CPU's other threads take longer to wake than they save."""
LEAST_GAIN = 5e-3
"""Part of its loss that a unit must gain in a pass, or the pass was its last."""
Columns = tuple[slice, Tensor]
"""Columns of a tile, and what a move by 1 in one adds to what those to come want, above the diagonal
``[units or 1, columns, columns]``; with G what it adds to those of all columns, and beside it that part."""


@dataclass(frozen=True)
class Descent:
    """Holds the result of a descent."""

    integers: Real[Tensor, "heads rows d_in"]
    passes: Int[Tensor, " heads"]
    """Number of passes over all columns that the unit with the most passes took."""
    loss_before: Float[Tensor, "heads separable"]
    """Objective of the integers that it began with, in its independent parts."""
    losses: Float[Tensor, "heads steps"]
    """Objective of each head at the start, and after each pass."""


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
    integers stay as they were. With G, and on an accelerator, a pass may leave moves to the next (tile.py).
    With ``heads_alone`` a head's rows end together even where H is the only one: that of one head of several.
    """
    small = G is not None and len(W) * _tile_of(G)[0] * W.shape[-1] <= ONE_THREAD
    with one_thread(where=small and W.device.type == "cpu"):
        errors, step = dequantize(integers, grid) - W, grid.step()
        curvature = H.diagonal(dim1=1, dim2=2)[:, None]
        if G is not None:
            curvature = curvature * _diagonal(G)[..., None]
        q, newton, tiles = integers.to(W.dtype, copy=True), -1 / (step * curvature), _tiles(H, grid, G)
        units = _Units(q, errors, step, newton, times(errors, H), H, tiles, G, grid)
        if G is None and H.shape[0] == 1 and not heads_alone:
            units = units.changed(lambda x: x.flatten(0, 1)[:, None], H, tiles, None)  # each row
        before = units.loss()  # [units, separable]
        current, loss = units.integers.clone(), before.sum(-1)
        taken = torch.zeros_like(loss, dtype=torch.long)
        left = torch.arange(len(loss), device=W.device)
        losses = [loss]
        for done in range(1, passes + 1):
            now = units.visit(loss)
            current.index_copy_(0, left, units.integers)
            taken[left] = done
            losses.append(losses[-1].index_copy(0, left, now))
            going = ((now < loss) & (now <= (1 - LEAST_GAIN) * loss)).nonzero()[:, 0]
            if not going.numel():
                break
            left, loss, units = left[going], now[going], units.some(going)
        current = current.view_as(integers)
        after = reconstruction_loss(dequantize(current, grid) - W, H, G)
        kept = keep_better(integers, before.view_as(after), current.to(integers.dtype), after)
        by_head = torch.stack(losses).view(len(losses), len(W), -1).sum(-1).T
        return Descent(kept, taken.view(len(W), -1).amax(-1), before.view_as(after), by_head)


def _tile_of(G: Tensor) -> tuple[int, int]:
    """Return the rows and columns of a tile of a head with G ``[units, rows, rows]``."""
    return COUPLED if G.shape[-1] <= LARGE_HEAD else COUPLED_LARGE


def _diagonal(G: Float[Tensor, "units rows rows"]) -> Float[Tensor, "units rows"]:
    """Return the diagonal of G, but 1 where its inverse might overflow: there P is 0, or next to it."""
    diagonal = G.diagonal(dim1=1, dim2=2)
    return diagonal.where(diagonal > torch.finfo(G.dtype).tiny, 1)


def _tiles(H: Float[Tensor, "#units d_in d_in"], grid: Grid, G: Tensor | None) -> list[Columns]:
    """Return the tiles. The columns of each belong to one group, in which the scale of a row is the same."""
    # so it cancels out: it is that of the column that moves and of the one that wants to
    own = grid.zeta * H.diagonal(dim1=1, dim2=2)
    tiles: list[Columns] = []
    for group in _slices(0, H.shape[-1], H.shape[-1] // grid.scale.shape[-1]):
        for here in _slices(group.start, group.stop, COLUMNS if G is None else _tile_of(G)[1]):
            effects = -grid.zeta[here, None] * H[:, here, here] / own[:, None, here]
            later = effects.triu(1)
            tiles.append((here, later if G is None else torch.cat([effects, later], -1)))
    return tiles


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
    tiles: list[Columns]
    G: Float[Tensor, "units rows rows"] | None
    grid: Grid
    """Tells the integers that there are."""

    def some(self, chosen: Int[Tensor, " some"]) -> "_Units":
        if len(chosen) == len(self.errors):
            return self
        H, tiles = self.H, self.tiles
        if len(H) > 1:
            H, tiles = H[chosen], [(here, effects[chosen]) for here, effects in tiles]
        G = None if self.G is None else self.G[chosen]
        return self.changed(lambda x: x.index_select(0, chosen), H, tiles, G)

    def changed(
        self, change: Callable[[Tensor], Tensor], H: Tensor, tiles: list[Columns], G: Tensor | None
    ) -> "_Units":
        """Return other units, with the fields changed that have a number for each weight."""
        q, errors, step, newton, R = map(change, (self.integers, self.errors, self.step, self.newton, self.R))
        return _Units(q, errors, step, newton, R, H, tiles, G, self.grid)

    def loss(self) -> Float[Tensor, "units separable"]:
        """Return the objective of each unit in its independent parts: rows, or with G the head."""
        if self.G is None:
            return (self.errors * self.R).sum(-1)
        return (self.errors * (self.G @ self.R)).sum(-1).sum(-1, keepdim=True)

    def visit(self, loss: Float[Tensor, " units"]) -> Float[Tensor, " units"]:
        """Visit all weights; return the objective of each unit, which was ``loss``."""
        asks = self.R.device.type == "cpu"
        if self.G is None:
            self._visit_independent_rows(asks=asks)
            return self.loss().sum(-1)
        for rows in _slices(0, self.errors.shape[1], _tile_of(self.G)[0]):
            loss = loss + self._visit_coupled_rows(rows, self.G, asks=asks)
        return loss

    def _visit_independent_rows(self, *, asks: bool) -> None:
        for here, effects in self.tiles:
            moves = find_moves(self._tile(slice(None), here, self.R[..., here]), effects, asks=asks)
            few = moving(moves) if asks else None
            if few is not None and not few.numel():
                continue
            delta = self._move(slice(None), here, moves)
            if few is None or 2 * len(few) > len(delta) or len(self.H) > 1:
                add_times(self.R, delta, self.H[:, here])
            else:  # most units are still
                R = self.R.index_select(0, few)
                add_times(R, delta.index_select(0, few), self.H[:, here])
                self.R.index_copy_(0, few, R)

    def _visit_coupled_rows(
        self, rows: slice, G: Float[Tensor, "units rows rows"], *, asks: bool
    ) -> Float[Tensor, " units"]:
        """Visit a few rows of each head, with tensors so small that the number of calls counts.

        It returns what their moves add to the objective of each head.
        """
        R, of_all, G = self.R[:, rows], G[:, rows], G[:, rows, rows]
        relative = below = (G / _diagonal(G)[..., None]).tril(-1)
        gained, width = G.new_zeros(len(G)), R.shape[-1] // self.grid.scale.shape[-1]
        for window in self._windows():
            ahead = slice(window[0][0].start, window[-1][0].stop)
            P = of_all @ self.R[..., ahead]  # a product for each tile would take as long
            before, moved = P.clone(), list[Tensor]()
            for here, effects in window:
                some = slice(here.start - ahead.start, here.stop - ahead.start)
                if here.start % width == 0:  # the same in all columns of a group, as zeta is in all rows
                    step = self.step[:, rows, here.start]
                    below = relative * step[:, None] / step[..., None]
                moves = find_coupled_moves(self._tile(rows, here, P[..., some]), effects[0], below, asks=asks)
                moved.append(self._move(rows, here, moves))
                P.baddbmm_(G, times(moved[-1], self.H[:, here, ahead]))
            delta = torch.cat(moved, -1)
            R += times(delta, self.H[:, ahead])
            gained += (delta * (before + P)).sum((1, 2))
        return gained

    def _windows(self) -> Iterator[list[Columns]]:
        """Yield the tiles in order: at a time as many as have ``AHEAD`` columns at most, or one."""
        window: list[Columns] = []
        for tile in self.tiles:
            if window and tile[0].stop - window[0][0].start > AHEAD:
                yield window
                window = []
            window.append(tile)
        yield window

    def _tile(self, rows: slice, columns: slice, P: Tensor) -> Tile:
        here = (slice(None), rows, columns)
        down = -self.integers[here]
        return Tile(P * self.newton[here], down, down + self.grid.largest, self.grid.levels)

    def _move(self, rows: slice, columns: slice, moves: Tensor) -> Tensor:
        """Change a tile's integers and errors; return the change of its weights."""
        here = (slice(None), rows, columns)
        q, errors, delta = self.integers[here], self.errors[here], moves * self.step[here]
        q += moves
        errors += delta
        return delta


def _slices(start: int, stop: int, step: int) -> Iterator[slice]:
    return (slice(first, min(first + step, stop)) for first in range(start, stop, step))
