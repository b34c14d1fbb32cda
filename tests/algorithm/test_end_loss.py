"""The predicted loss is the one that OPTQ leaves, and sampled rows stand for all."""

import pytest
import torch
from torch import Tensor

from aespa_pl.algorithm.end_loss import predicted, row_losses, sampled_rows, uncompensated, uncorrected
from aespa_pl.algorithm.grid import search_grid
from aespa_pl.algorithm.grid_types import TYPES
from aespa_pl.algorithm.optq import update_weights
from aespa_pl.algorithm.quantizer import GridFormat, dequantize


def second_moment(columns: int) -> Tensor:
    X = torch.randn(columns, 200, dtype=torch.float64) + 2 * torch.randn(200, dtype=torch.float64)
    X *= torch.linspace(0.5, 3, columns, dtype=torch.float64)[:, None]
    return X @ X.T / 200


def test_the_loss_of_optq_is_the_sum_of_its_rounding_errors_weighted_by_d() -> None:
    H, damping = second_moment(12), 0.01
    damped = H + damping * H.diagonal().mean() * torch.eye(12, dtype=torch.float64)
    W = torch.randn(1, 5, 12, dtype=torch.float64)
    grid = search_grid(W, damped[None], torch.ones(12, dtype=torch.float64), GridFormat(2))[0]
    visited, integers, _ = update_weights(W, damped[None], grid)
    rounded = dequantize(integers, grid)
    errors = (visited - rounded)[0]
    dW = (W - rounded)[0]
    loss = torch.einsum("ri,ij,rj->r", dW, damped, dW)
    torch.testing.assert_close(errors.square() @ uncompensated(H, damping), loss)


def test_independent_inputs_compensate_nothing() -> None:
    H = torch.diag(torch.tensor([1.0, 4.0, 0.25, 3.0]))
    mean = H.diagonal().mean()
    torch.testing.assert_close(uncompensated(H, 0.1), H.diagonal() + 0.1 * mean)


@pytest.mark.parametrize("form", [GridFormat(3), GridFormat.of(TYPES["Q4_0"])])
def test_prediction_is_half_the_sum_of_weighted_squares(form: GridFormat) -> None:
    W, D = torch.randn(7, 64), torch.rand(64) + 0.1
    gradients = torch.rand(7, 1)
    losses = row_losses(W, D, form)
    expected = sum(0.5 * float(gradients[i]) * float(losses[i, j]) for i in range(7) for j in range(64))
    assert predicted(W, gradients, D, form, 7) == pytest.approx(expected, rel=1e-5)
    # errors are smaller than half the range of 3 bits, and not 0
    assert 0 < float((losses / D).sqrt().max()) < float(W.abs().max())


def test_rows_are_drawn_in_proportion_to_their_mass() -> None:
    mass = torch.tensor([1.0, 0.0, 5.0, 2.0, 2.0])
    counts = sampled_rows(mass, 1000).bincount(minlength=5)
    torch.testing.assert_close(counts / 1000, mass / 10, atol=2e-3, rtol=0)


def test_few_rows_predict_nearly_what_all_do() -> None:
    W, D, form = torch.randn(400, 32), torch.rand(32), GridFormat.of(TYPES["Q4_0"])
    gradients = torch.rand(400, 1).square()
    whole = predicted(W, gradients, D, form, 400)
    # the losses of rows scatter by about a quarter, and the mean of 100 by a tenth of that
    assert predicted(W, gradients, D, form, 100) == pytest.approx(whole, rel=0.1)


def test_a_matrix_without_influence_costs_nothing() -> None:
    W, D = torch.randn(40, 32), torch.ones(32)
    assert predicted(W, torch.zeros(40, 1), D, GridFormat(2), 10) == 0


def test_of_an_embeddings_errors_is_left_what_a_regression_on_its_rows_leaves() -> None:
    W, counts = torch.randn(40, 8), torch.randint(1, 30, (40,))
    root = counts.sqrt()[:, None]
    errors = torch.eye(40)  # each column has the error of one row
    fit = torch.linalg.lstsq(root * W, root * errors).solution
    residual = (root * (errors - W @ fit)).square().sum(0)
    left = uncorrected(W, counts, 1e-9, 1.0)
    torch.testing.assert_close(residual, left * counts, rtol=1e-4, atol=1e-4)
    quarter = uncorrected(W, counts, 1e-9, 0.5)  # half of an error is a quarter of its square
    torch.testing.assert_close(1 - quarter, 0.75 * (1 - left))


def test_without_a_correction_or_its_token_an_error_is_left_whole() -> None:
    W, counts = torch.randn(6, 3), torch.tensor([5, 0, 9, 1, 0, 2])
    assert bool((uncorrected(W, counts, 0.01, 0.0) == 1).all())
    assert torch.equal(uncorrected(W, counts, 0.01, 0.5) == 1, counts == 0)


def test_fewer_tokens_than_columns_need_no_damping_of_the_users() -> None:
    left = uncorrected(torch.randn(3, 8), torch.tensor([4, 1, 2]), 0.0, 1.0)
    assert bool(
        ((left >= 0) & (left < 0.5)).all()
    )  # three points are fitted but for the damping that is added
