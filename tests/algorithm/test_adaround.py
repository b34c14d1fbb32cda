"""Gradient against autograd, schedule against its definition, result against all 2^8 roundings."""

import statistics

import pytest
import torch
from torch import Tensor

from aespa_pl.algorithm.adaround import (
    SoftRounding,
    decide,
    penalty_exponent,
    rectified_sigmoid,
    rounding_loss,
    start,
)
from aespa_pl.algorithm.grid import search_grid
from aespa_pl.algorithm.objectives import keep_better, reconstruction_loss
from aespa_pl.algorithm.optq import update_weights
from aespa_pl.algorithm.quantizer import Grid, GridFormat, dequantize
from tests import reference


def problem(heads: int, rows: int, columns: int, bits: int = 2) -> tuple[Tensor, Tensor, Grid]:
    mix = torch.randn(columns, columns, dtype=torch.float64)
    X = mix @ torch.randn(columns, 100, dtype=torch.float64)
    W = torch.randn(heads, rows, columns, dtype=torch.float64)
    H = (X @ X.T)[None] / 50
    zeta = torch.ones(columns, dtype=torch.float64)
    return W, H, search_grid(W, H, zeta, GridFormat(bits, symmetric=False, group_size=None))[0]


def autograd_loss(
    B: Tensor, W: Tensor, updated: Tensor, grid: Grid, H: Tensor, G: Tensor | None, beta: float | None
) -> Tensor:
    """The definition, with lambda 1.5, left to autograd."""
    h = torch.clamp(1.2 * torch.sigmoid(B) - 0.1, 0, 1)
    step, zero = grid.step(), grid.zero()
    q = torch.clamp(torch.floor(updated / step) + h + zero, 0, grid.largest)
    dW = step * (q - zero) - W
    total = B.new_zeros(())
    for head in range(dW.shape[0]):
        inner = dW[head] @ H[min(head, H.shape[0] - 1)] @ dW[head].T
        total = total + torch.trace(inner if G is None else G[head] @ inner)
    if beta is not None:
        total = total + 1.5 * (1 - (2 * h - 1).abs() ** beta).sum()
    return total


@pytest.mark.parametrize("beta", [None, 2.0, 7.5, 20.0])
@pytest.mark.parametrize("kind", ["query", "value", "other"])
def test_closed_form_equals_autograd(kind: str, beta: float | None) -> None:
    heads, rows, columns = (1, 6, 5) if kind == "other" else (3, 4, 5)
    W, H, grid = problem(heads, rows, columns)
    G = None
    if kind == "value":
        H = torch.cat([H, 2 * H, 3 * H])
    if kind == "query":
        K = torch.randn(heads, 9, rows, dtype=torch.float64)
        G = K.transpose(1, 2) @ K
    updated = W + torch.randn_like(W)  # far enough to leave the range of the integers
    rounding, B = start(W, updated, grid)
    assert rounding.gain is not None
    assert 0 < int((rounding.gain == 0).sum()) < W.numel()
    B = (B + torch.randn_like(B)).requires_grad_()
    expected = autograd_loss(B, W, updated, grid, H, G, beta)
    (gradient,) = torch.autograd.grad(expected, B)
    found = rounding_loss(B.detach(), rounding, H, G, weight=1.5, beta=beta)
    torch.testing.assert_close(found.reconstruction + found.penalty, expected.detach())
    torch.testing.assert_close(found.gradient, gradient)
    assert (float(found.penalty) == 0) == (beta is None)


def test_start_has_the_fraction_of_the_updated_weight() -> None:
    W, _, grid = problem(1, 4, 6)
    updated = W + 0.3 * torch.randn_like(W)
    rounding, B = start(W, updated, grid)
    ratio = updated / grid.step()
    torch.testing.assert_close(ratio.floor() + rectified_sigmoid(B), ratio)
    below = ratio.floor() + grid.zero()
    assert bool((below < -1).any() | (below > 3).any())
    assert torch.equal(rounding.lower.to(below), below.clamp(-1, 3))


def test_stretched_sigmoid_is_cut_at_0_and_1() -> None:
    B = torch.tensor([-9.0, -2.4, -2.3, 0.0, 2.3, 2.4, 9.0], dtype=torch.float64)
    assert rectified_sigmoid(B).tolist() == pytest.approx([0, 0, 0.00925, 0.5, 0.99075, 1, 1], abs=1e-4)


def test_loss_is_measured_against_the_original_weight() -> None:
    W, H, grid = problem(1, 4, 6)
    rounding, B = start(W, W + 0.3 * torch.randn_like(W), grid)
    integers = decide(B, rounding)
    hard = torch.where(rectified_sigmoid(B) >= 0.5, 50.0, -50.0).double()
    found = rounding_loss(hard, rounding, H, None, weight=1.0, beta=None)
    expected = reconstruction_loss(dequantize(integers, grid) - W, H).sum()
    torch.testing.assert_close(found.reconstruction, expected)


def test_exponent_waits_for_the_warm_up_then_falls_linearly() -> None:
    schedule = [penalty_exponent(i, 10, warmup=0.2, start=20.0, end=2.0) for i in range(11)]
    assert schedule[:2] == [None, None]
    assert schedule[2] == 20
    assert schedule[6] == pytest.approx(11)
    assert schedule[10] == pytest.approx(2)


def test_no_warm_up_penalizes_from_the_first_iteration() -> None:
    assert penalty_exponent(0, 10, warmup=0.0, start=20.0, end=2.0) == 20


def test_decided_integers_stay_in_range() -> None:
    W, _, grid = problem(1, 4, 6)
    rounding, B = start(W, 10 * W, grid)
    integers = decide(B + torch.randn_like(B), rounding)
    assert bool(((integers >= 0) & (integers <= 3)).all())


def learn(rounding: SoftRounding, B: Tensor, H: Tensor, iterations: int = 2000) -> Tensor:
    B = B.clone().requires_grad_()
    adam = torch.optim.Adam([B], lr=0.015)
    for i in range(iterations):
        beta = penalty_exponent(i, iterations, warmup=0.2, start=20.0, end=2.0)
        B.grad = rounding_loss(B.detach(), rounding, H, None, weight=0.01, beta=beta).gradient
        adam.step()
    return decide(B.detach(), rounding)


def test_learning_comes_close_to_the_best_of_all_roundings() -> None:
    """40 rows of 8 weights: all 2^8 choices between the two neighbours of OPTQ's W'."""
    W, H, grid = problem(1, 40, 8, bits=3)
    updated, optq, _ = update_weights(W, H, grid)
    rounding, B = start(W, updated, grid)
    learned = learn(rounding, B, H)
    loss = {
        name: reconstruction_loss(dequantize(q, grid) - W, H)[0]
        for name, q in (("learned", learned), ("optq", optq))
    }
    kept = keep_better(learned, loss["learned"][None], optq, loss["optq"][None])
    final = reconstruction_loss(dequantize(kept, grid) - W, H)[0]
    assert bool((final <= loss["learned"] + 1e-12).all())
    assert bool((final <= loss["optq"] + 1e-12).all())
    ratios = []
    for row in range(40):
        step, zero, low = grid.step()[0, row], grid.zero()[0, row], rounding.lower[0, row]
        best = reference.best_rounding(low, step, zero, W[0, row], H[0], grid.largest)
        ratios.append(float(final[row]) / best)
    assert min(ratios) > 1 - 1e-9
    assert statistics.median(ratios) < 1.05
