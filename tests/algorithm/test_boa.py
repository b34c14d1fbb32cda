"""Row after row: against OPTQ's rule on the whole Kronecker Hessian, and for the loss it is made for."""

import torch
from torch import Tensor

from aespa_pl.algorithm.grid import min_max_grid
from aespa_pl.algorithm.optq import update_rows, update_weights
from aespa_pl.algorithm.quantizer import Grid, GridFormat, dequantize

HEADS, ROWS, COLUMNS = 2, 3, 4


def problem(rows: int = ROWS, columns: int = COLUMNS) -> tuple[Tensor, Tensor, Tensor, Grid]:
    W = torch.randn(HEADS, rows, columns, dtype=torch.float64)
    X = torch.randn(columns, 3 * columns, dtype=torch.float64)
    X += X.mean(0)  # correlated inputs
    K = torch.randn(HEADS, rows, 3 * rows, dtype=torch.float64)
    K += K.mean(1, keepdim=True)
    grid = min_max_grid(W, torch.ones(columns, dtype=torch.float64), GridFormat(2))
    return W, (X @ X.T)[None], K @ K.mT, grid


def conditional_minimum(W: Tensor, H: Tensor, G: Tensor, step: Tensor, zero: Tensor) -> Tensor:
    """Fix one weight after the other; the free ones then go to the minimum of the loss, solved densely."""
    rows, columns = W.shape
    order = H.diagonal().argsort(descending=True)
    places = [int(i * columns + j) for i in range(rows) for j in order]
    hessian, target = torch.kron(G, H), W.flatten()
    now, integers = target.clone(), torch.zeros_like(target)
    for n, place in enumerate(places):
        s, z = step.flatten()[place], zero.flatten()[place]
        integers[place] = (now[place] / s).round().add(z).clamp(0, 3)
        now[place] = s * (integers[place] - z)
        fixed, free = places[: n + 1], places[n + 1 :]
        error = now[fixed] - target[fixed]
        # d/dx of (error, x) M (error, x)^T = 0
        moved = torch.linalg.solve(hessian[free][:, free], -hessian[free][:, fixed] @ error)
        now[free] = target[free] + moved
    return integers.view(rows, columns)


def test_integers_are_those_of_the_dense_problem_solved_anew_for_each_weight() -> None:
    for _ in range(10):
        W, H, G, grid = problem()
        _, integers, added = update_rows(W, H, G, grid)
        assert float(added.max()) == 0
        for h in range(HEADS):
            expected = conditional_minimum(W[h], H[0], G[h], grid.step()[h], grid.zero()[h])
            assert torch.equal(integers[h], expected)


def test_visited_weights_round_to_the_integers() -> None:
    W, H, G, grid = problem()
    visited, integers, _ = update_rows(W, H, G, grid)
    nearest = (visited / grid.step()).round().add(grid.zero()).clamp(0, 3)
    assert torch.equal(nearest, integers)


def test_without_coupling_of_rows_it_is_optq() -> None:
    W, H, _, grid = problem(8, 16)
    identity = torch.eye(8, dtype=torch.float64).expand(HEADS, 8, 8)
    for ours, plain in zip(update_rows(W, H, identity, grid), update_weights(W, H, grid), strict=True):
        torch.testing.assert_close(ours, plain)


def test_loss_of_the_scores_falls_below_that_of_optq() -> None:
    losses = []
    for _ in range(8):
        W, H, G, grid = problem(8, 16)
        pair = (update_rows(W, H, G, grid)[1], update_weights(W, H, grid)[1])
        found = [dequantize(q, grid) - W for q in pair]
        losses.append([float(((G @ dW @ H) * dW).sum()) for dW in found])
    ours, plain = map(sum, zip(*losses, strict=True))
    assert ours < plain


def test_damping_that_the_coupling_needed_is_reported() -> None:
    W, H, G, grid = problem()
    *_, added = update_rows(W, H, G, grid)
    assert float(added.max()) == 0
    *_, added = update_rows(W, H, torch.zeros_like(G) + 1, grid)  # rank 1
    assert float(added.min()) > 0


def test_head_without_keys_is_rounded_as_by_optq() -> None:
    W, H, G, grid = problem(8, 16)
    G[0] = 0
    _, integers, _ = update_rows(W, H, G, grid)
    _, alone, _ = update_weights(W, H, grid)
    assert torch.equal(integers[0], alone[0])
    assert not torch.equal(integers[1], alone[1])
