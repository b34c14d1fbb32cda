"""Coordinate descent on the integers themselves: each moves to its best value, the others fixed.

With ``dW = step (q - zero) - W`` and ``P = G dW H``, changing integer ``q_ij`` by m changes the
objective ``tr(G dW H dW^T)`` by ``2 m s_ij P_ij + m^2 s_ij^2 G_ii H_jj`` and P by
``m s_ij G[:, i] H[j, :]``. So the best integer is ``q_ij + round(-P_ij / (G_ii H_jj s_ij))``, clipped.
Rounding takes a half to 0 and clipping makes a move smaller, so a move that is not 0 always lowers
the objective; a pass that moves nothing ends the descent, in a minimum of each integer alone.

Source: coordinate descent on the integer least-squares problem that rounding is (closest vector
problem; Eq. 17, 21 and 22 of the paper are its quadratic forms); the blocks of columns are OPTQ's.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Real
from torch import Tensor

from aespa_pl.algorithm.objectives import error_product, keep_better, reconstruction_loss
from aespa_pl.algorithm.quantizer import Grid, dequantize

BLOCK = 128
"""Columns whose moves reach the columns after them together, with one product; at least so many."""
BLOCK_ELEMENTS = 2**14
"""Weights of a block: with few rows it has more columns. The rows of a head are visited one by one,
so with 12 heads a block of 128 columns is so small that calls, not numbers, take the time: 0.7 of it
with all 768 columns."""


@dataclass(frozen=True)
class Descent:
    """What a descent found."""

    integers: Real[Tensor, "heads rows d_in"]
    passes: int
    """Visits of all columns; the last of them moved nothing, unless the limit came first."""
    changed: int
    """Integers that differ from those that it began with."""
    loss_before: float
    """Objective of those that it began with."""


def descend(
    integers: Real[Tensor, "heads rows d_in"],
    W: Float[Tensor, "heads rows d_in"],
    grid: Grid,
    H: Float[Tensor, "#heads d_in d_in"],
    G: Float[Tensor, "heads rows rows"] | None = None,
    *,
    passes: int,
) -> Descent:
    """Visit the columns in their order, again and again, and move each integer to its best value.

    Without G all rows are visited at once. G couples the rows of a head: they are visited one after
    the other, those of all heads at once. Each pass begins with a new product, so rounding errors do
    not add up, and where the objective ended higher all the same (in a row, with G in a head) the
    integers stay as they were.

    Args:
        integers: To begin with, of any type; the result is of the same.
        W: Original weights.
        grid: Grid of the projection.
        H: Damped Hessian.
        G: Second moment of the other side (query and key projections), or None.
        passes: Visits of all columns at most.
    """
    current, done, moving = integers.to(W.dtype), 0, True
    while moving and done < passes:
        R = error_product(dequantize(current, grid) - W, H)
        if G is None:
            moved = _visit(current, R, grid.step(), H, grid.levels)
        else:
            moved = _visit_row_by_row(current, R, grid, H, G)
        moving = not torch.equal(moved, current)
        current, done = moved, done + 1
    before, after = (
        reconstruction_loss(dequantize(q, grid) - W, H, G) for q in (integers, current)
    )
    kept = keep_better(integers, before, current.to(integers.dtype), after)
    return Descent(kept, done, int((kept != integers).sum()), float(before.sum()))


def _visit_row_by_row(
    integers: Float[Tensor, "heads rows d_in"],
    R: Float[Tensor, "heads rows d_in"],
    grid: Grid,
    H: Float[Tensor, "#heads d_in d_in"],
    G: Float[Tensor, "heads rows rows"],
) -> Float[Tensor, "heads rows d_in"]:
    """Return the integers after a pass; R is ``dW H``.

    Over ``G_ii``, row i's part of ``G dW H`` changes with the row's own moves as if there were no G.
    """
    q, R, step = integers.clone(), R.clone(), grid.step()
    tiny = torch.finfo(G.dtype).tiny  # where G_ii is 0, so is its row: nothing moves
    for i in range(q.shape[1]):
        P = (G[:, i, None] @ R)[:, 0] / G[:, i, i, None].clamp(min=tiny)  # [heads, d_in]
        moved = _visit(q[:, i], P, step[:, i], H, grid.levels)
        delta = step[:, i] * (moved - q[:, i])
        R[:, i] += error_product(delta[:, None], H)[:, 0]
        q[:, i] = moved
    return q


def _visit(
    integers: Float[Tensor, "*rows d_in"],
    P: Float[Tensor, "*rows d_in"],
    step: Float[Tensor, "*rows d_in"],
    H: Float[Tensor, "problems d_in d_in"],
    levels: int,
) -> Float[Tensor, "*rows d_in"]:
    """Return the integers of rows that don't depend on each other after one visit of the columns.

    Args:
        integers: Of the rows, those of the first H first.
        P: Half the gradient with respect to ``dW``, over the row's factor ``G_ii`` if it has one.
        step: Of each weight.
        H: One for all rows, or one for each equal part of them.
        levels: The largest integer.
    """
    split = (H.shape[0], -1, H.shape[-1])  # [problems, rows, d_in]
    q, P, s = integers.reshape(split).clone(), P.reshape(split).clone(), step.reshape(split)
    size = max(BLOCK, BLOCK_ELEMENTS // (q.shape[0] * q.shape[1]))
    for start in range(0, H.shape[-1], size):
        here, after = slice(start, start + size), slice(start + size, None)
        moved = _visit_block(q[..., here], P[..., here], s[..., here], H[:, here, here], levels)
        delta = s[..., here] * (moved - q[..., here])
        if delta.any():
            P[..., after] += delta @ H[:, here, after]
            q[..., here] = moved
    return q.view_as(integers)


def _visit_block(
    integers: Float[Tensor, "problems rows columns"],
    P: Float[Tensor, "problems rows columns"],
    step: Float[Tensor, "problems rows columns"],
    H: Float[Tensor, "problems columns columns"],
    levels: int,
) -> Float[Tensor, "problems rows columns"]:
    """Return the integers after a visit of a few columns.

    Column after column would be mostly idle: few integers move. So every turn makes, in each row,
    the row's next move, wherever it is: the same moves, in as many turns as a row has moves at most.
    """
    rows, columns = torch.arange(step[..., 0].numel()), torch.arange(P.shape[-1])
    rows, columns = rows.to(P.device), columns.to(P.device)
    problem = rows // step.shape[1]  # the H of each row
    newton = (-1 / (step * H.diagonal(dim1=1, dim2=2)[:, None])).flatten(0, 1)
    q, s, P = integers.flatten(0, 1).clone(), step.flatten(0, 1), P.flatten(0, 1).clone()
    down, up = -q, levels - q
    for _ in columns:  # a row visits each once; NaN would go on for ever
        moves = (P * newton).round_().clamp_(down, up)
        at = (moves != 0).view(torch.uint8).argmax(-1, keepdim=True)  # the first that is not 0
        move = moves.gather(1, at)
        active = move[:, 0].nonzero()[:, 0]
        if not active.numel():
            break
        q[rows, at[:, 0]] += move[:, 0]
        P.addcmul_(move * s.gather(1, at), H[problem, at[:, 0]])
        newton.masked_fill_(columns <= at, 0)  # visited
        if 2 * active.numel() <= rows.numel():  # most rows are through
            P, newton, down, up, s, rows, problem = (
                x[active] for x in (P, newton, down, up, s, rows, problem)
            )
    return q.view_as(integers)
