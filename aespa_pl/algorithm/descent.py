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

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from aespa_pl.algorithm.objectives import keep_better, reconstruction_loss
from aespa_pl.algorithm.quantizer import Grid, dequantize
from aespa_pl.algorithm.threads import one_thread

COLUMNS = 32
"""Columns of a tile, whose moves are found together and reach the other columns with one product."""
COUPLED_ROWS, COUPLED_COLUMNS = 16, 16
"""Rows and columns of a tile with G. A larger one takes fewer calls, and more rounds to settle."""
ONE_THREAD = 2**20
"""Numbers of a tile's rows with G up to which the CPU's other threads take longer to wake than they save."""
LEAST_GAIN = 1e-3
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
    """
    small = G is not None and len(W) * COUPLED_ROWS * W.shape[-1] <= ONE_THREAD
    with one_thread(where=small and W.device.type == "cpu"):
        return _descend(integers, W, grid, H, G, passes=passes)


def _descend(
    integers: Real[Tensor, "heads rows d_in"],
    W: Float[Tensor, "heads rows d_in"],
    grid: Grid,
    H: Float[Tensor, "#heads d_in d_in"],
    G: Float[Tensor, "heads rows rows"] | None,
    *,
    passes: int,
) -> Descent:
    dW = dequantize(integers, grid) - W
    units = _Units(
        integers.to(W.dtype, copy=True), dW, grid.step(), _times(dW, H), H, G, grid.largest
    )
    if G is None and H.shape[0] == 1:
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
    R: Float[Tensor, "units rows d_in"]
    """``dW H``."""
    H: Float[Tensor, "#units d_in d_in"]
    G: Float[Tensor, "units rows rows"] | None
    largest: int
    """The largest integer."""

    def rows_alone(self) -> "_Units":
        """Return the same weights with each row as a unit."""
        q, errors, step, R = (
            x.flatten(0, 1)[:, None] for x in (self.integers, self.errors, self.step, self.R)
        )
        return _Units(q, errors, step, R, self.H, None, self.largest)

    def some(self, chosen: Int[Tensor, " some"]) -> "_Units":
        """Return some of the units, in their order."""
        if len(chosen) == len(self.errors):
            return self
        q, errors, step, R = (
            x.index_select(0, chosen) for x in (self.integers, self.errors, self.step, self.R)
        )
        H = self.H if len(self.H) == 1 else self.H[chosen]
        G = None if self.G is None else self.G[chosen]
        return _Units(q, errors, step, R, H, G, self.largest)

    def loss(self) -> Float[Tensor, "units separable"]:
        """Return the objective of each unit in its independent parts: rows, or with G the head."""
        if self.G is None:
            return (self.errors * self.R).sum(-1)
        return (self.errors * (self.G @ self.R)).sum(-1).sum(-1, keepdim=True)

    def visit(self) -> None:
        """Visit all integers once, in tiles of rows and columns."""
        rows = self.errors.shape[1] if self.G is None else COUPLED_ROWS
        for start in range(0, self.errors.shape[1], rows):
            self._visit_rows(slice(start, start + rows))

    def _visit_rows(self, rows: slice) -> None:
        G, P, size = None, self.R, COLUMNS
        if self.G is not None:
            G, P, size = self.G[:, rows, rows], self.G[:, rows] @ self.R, COUPLED_COLUMNS
        for start in range(0, self.H.shape[-1], size):
            columns = slice(start, start + size)
            here = (slice(None), rows, columns)
            q, step = self.integers[here], self.step[here]
            H = self.H[:, columns, columns]
            tile = P[..., columns], step, -q, self.largest - q
            moves = _moves(*tile, H=H) if G is None else _coupled_moves(*tile, H=H, G=G)
            moved = moves.flatten(1).any(-1).nonzero()[:, 0]
            if not moved.numel():
                continue
            q += moves
            delta = moves * step
            self.errors[here] += delta
            if G is not None:
                change = _times(delta, self.H[:, columns])
                self.R[:, rows] += change
                P[..., columns.stop :].baddbmm_(G, change[..., columns.stop :])
            elif 2 * len(moved) > len(P) or len(self.H) > 1:
                P.add_(_times(delta, self.H[:, columns]))
            else:  # most units are still
                few = P.index_select(0, moved)
                few.add_(_times(delta.index_select(0, moved), self.H[:, columns]))
                P.index_copy_(0, moved, few)


def _moves(
    P: Float[Tensor, "units rows columns"],
    step: Float[Tensor, "units rows columns"],
    down: Float[Tensor, "units rows columns"],
    up: Float[Tensor, "units rows columns"],
    *,
    H: Float[Tensor, "#units columns columns"],
) -> Float[Tensor, "units rows columns"]:
    """Return the moves of a visit of weight after weight, where rows don't depend on each other.

    Each depends on those before it. All are found at once, again and again, with the effects of the moves
    that were found before: so the first is right at once, the second when the first is, and so on. As few
    moves matter to others, all are settled after a few rounds.

    Args:
        P: Half the gradient with respect to ``dW``.
        step: Distance of two neighbouring values of each weight.
        down: The least moves that stay in the range.
        up: The largest moves that stay in the range.
        H: Damped Hessian between these columns.
    """
    newton, later = -1 / (step * H.diagonal(dim1=1, dim2=2)[:, None]), H.triu(1)
    found = moves = _nearest(P * newton, down, up)
    among = unsettled = moves.flatten(1).any(-1).nonzero()[:, 0]
    for _ in range(P[0].numel()):  # NaN would go on for ever
        if not unsettled.numel():
            break
        if len(H) == 1 and 2 * len(unsettled) <= len(moves):
            among = unsettled if moves is found else among[unsettled]
            P, newton, down, up, step, moves = (
                x.index_select(0, unsettled) for x in (P, newton, down, up, step, moves)
            )
        before = moves
        gradient = P + _times(moves * step, later)
        moves = _nearest(gradient.mul_(newton), down, up)
        if len(moves) == len(found):
            found = moves
        else:
            found.index_copy_(0, among, moves)
        unsettled = (moves != before).flatten(1).any(-1).nonzero()[:, 0]
    return found


def _coupled_moves(
    P: Float[Tensor, "units rows columns"],
    step: Float[Tensor, "units rows columns"],
    down: Float[Tensor, "units rows columns"],
    up: Float[Tensor, "units rows columns"],
    *,
    H: Float[Tensor, "#units columns columns"],
    G: Float[Tensor, "units rows rows"],
) -> Float[Tensor, "units rows columns"]:
    """Return the moves of a visit of weight after weight, row by row, where G couples the rows.

    They are found as in ``_moves``, which says what the arguments are; G is the second moment of the other
    side between these rows. These tensors are so small that the number of calls is what counts.
    """
    own, below = G.diagonal(dim1=1, dim2=2)[..., None], G.tril(-1)
    # where G_ii is 0, so is P: nothing moves
    curvature = H.diagonal(dim1=1, dim2=2)[:, None] * own.clamp(min=torch.finfo(G.dtype).tiny)
    newton, both = -1 / (step * curvature), torch.cat([H, H.triu(1)], -1)
    moves = _nearest(P * newton, down, up)
    for _ in range(P[0].numel()):  # NaN would go on for ever
        before = moves
        of_rows_above, of_this_row = _times(moves * step, both).chunk(2, -1)
        gradient = torch.baddbmm(P, below, of_rows_above).addcmul_(own, of_this_row)
        moves = _nearest(gradient.mul_(newton), down, up)
        if torch.equal(moves, before):
            break
    return moves


def _nearest(value: Tensor, least: Tensor, most: Tensor) -> Tensor:
    """Round in place, and keep within limits; a clamp with tensors would take four times as long."""
    value.round_()
    torch.maximum(value, least, out=value)
    return torch.minimum(value, most, out=value)


def _times(
    delta: Float[Tensor, "units rows columns"], H: Float[Tensor, "#units columns some"]
) -> Float[Tensor, "units rows some"]:
    """Return ``delta H``, as one large product where all units share H."""
    return delta @ (H[0] if len(H) == 1 else H)
