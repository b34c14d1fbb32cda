"""Each objective is the sum over calibration samples of the quantity that it stands for."""

import pytest
import torch
from torch import Tensor

from aespa_pl.algorithm.objectives import error_product, keep_better, reconstruction_loss
from tests import reference


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def test_plain_objective_is_the_squared_error_of_the_output() -> None:
    dW, X = random(1, 5, 6), random(6, 20)
    loss = reconstruction_loss(dW, (X @ X.T)[None]).sum()
    assert float(loss) == pytest.approx(reference.output_error(dW[0], X), rel=1e-12)


def test_value_objective_is_the_squared_error_of_the_attention_output() -> None:
    dW, X = random(3, 4, 6), random(6, 10)
    A = torch.softmax(random(3, 10, 10), -1)
    H = torch.stack([X @ a.T @ a @ X.T for a in A])
    loss = reconstruction_loss(dW, H).sum(1)
    for head in range(3):
        expected = reference.attention_output_error(dW[head], X, A[head])
        assert float(loss[head]) == pytest.approx(expected, rel=1e-12)


def test_query_objective_is_the_squared_error_of_all_scores() -> None:
    """Under the Kronecker approximation every query's error meets every key."""
    dW, X, K = random(2, 4, 6), random(6, 10), random(2, 7, 4)
    G = K.transpose(1, 2) @ K
    loss = reconstruction_loss(dW, (X @ X.T)[None], G)
    assert loss.shape == (2, 1)
    for head in range(2):
        expected = reference.score_error(dW[head], X, K[head])
        assert float(loss[head]) == pytest.approx(expected, rel=1e-12)


def test_product_is_half_the_gradient() -> None:
    dW, X, K = random(2, 4, 6).requires_grad_(), random(6, 10), random(2, 7, 4)
    H, G = (X @ X.T)[None], K.transpose(1, 2) @ K
    for g in (None, G):
        (gradient,) = torch.autograd.grad(reconstruction_loss(dW, H, g).sum(), dW)
        torch.testing.assert_close(2 * error_product(dW.detach(), H, g), gradient)


def test_one_hessian_for_all_heads_equals_a_copy_for_each() -> None:
    dW, X = random(3, 4, 6), random(6, 10)
    H = (X @ X.T)[None]
    torch.testing.assert_close(error_product(dW, H), error_product(dW, H.repeat(3, 1, 1)))


def test_better_rows_are_kept_one_by_one() -> None:
    a, b = torch.zeros(1, 3, 2), torch.ones(1, 3, 2)
    loss_a, loss_b = torch.tensor([[1.0, 5.0, 2.0]]), torch.tensor([[3.0, 4.0, 2.0]])
    assert keep_better(a, loss_a, b, loss_b)[0, :, 0].tolist() == [0, 1, 0]


def test_better_heads_are_kept_whole() -> None:
    a, b = torch.zeros(2, 3, 2), torch.ones(2, 3, 2)
    kept = keep_better(a, torch.tensor([[1.0], [5.0]]), b, torch.tensor([[3.0], [4.0]]))
    assert kept[0].sum() == 0
    assert kept[1].sum() == 6
