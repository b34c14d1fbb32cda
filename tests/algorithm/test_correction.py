"""Corrected weights against least squares on the samples themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor

from aespa_pl.algorithm.hessian import corrected_weights as corrected_and_damping
from aespa_pl.errors import NumericalError

D, TOKENS = 6, 50


def corrected_weights(*arguments: Any, **options: Any) -> Tensor:
    return corrected_and_damping(*arguments, **options)[0]


def solve(H: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``B H^-1``, the correction of weights that are 0, and the extra damping."""
    return corrected_and_damping(torch.zeros_like(B), B, H, 1.0)


def samples(heads: int = 1) -> tuple[Tensor, Tensor]:
    """Return inputs of the quantized and of the original stream, ``[heads, d, tokens]``."""
    X = torch.randn(heads, D, TOKENS, dtype=torch.float64)
    return X, X + 0.4 * torch.randn_like(X)


def statistics(W: Tensor, X: Tensor, original: Tensor) -> tuple[Tensor, Tensor]:
    shift = (W @ original - W @ X) @ X.transpose(1, 2) / TOKENS
    return shift, X @ X.transpose(1, 2) / TOKENS


@pytest.mark.parametrize("heads", [1, 3])
def test_the_whole_correction_is_the_least_squares_fit_of_the_originals_output(heads: int) -> None:
    X, original = samples(heads)
    W = torch.randn(heads, 4, D, dtype=torch.float64)
    target = corrected_weights(W, *statistics(W, X, original), alpha=1.0)
    for head in range(heads):
        expected = torch.linalg.lstsq(X[head].T, (W[head] @ original[head]).T).solution.T
        torch.testing.assert_close(target[head], expected)


def test_one_hessian_serves_all_heads() -> None:
    W = torch.randn(3, 4, D, dtype=torch.float64)
    shift, H = statistics(W, *samples())
    each = corrected_weights(W, shift, H.expand(3, D, D), alpha=0.7)
    torch.testing.assert_close(corrected_weights(W, shift, H, alpha=0.7), each)


def test_a_share_is_that_share_of_the_change() -> None:
    W = torch.randn(1, 4, D, dtype=torch.float64)
    shift, H = statistics(W, *samples())
    whole = corrected_weights(W, shift, H, alpha=1.0)
    torch.testing.assert_close(corrected_weights(W, shift, H, alpha=0.25) - W, 0.25 * (whole - W))


def test_with_a_residual_it_is_the_fit_of_the_originals_sum() -> None:
    X, original = samples()
    R, original_R = torch.randn(2, 4, TOKENS, dtype=torch.float64)
    W = torch.randn(1, 4, D, dtype=torch.float64)
    shift, H = statistics(W, X, original)
    target = corrected_weights(W, shift + (original_R - R) @ X.mT / TOKENS, H, alpha=1.0)
    missing = W[0] @ original[0] + original_R - R
    expected = torch.linalg.lstsq(X[0].T, missing.T).solution.T
    torch.testing.assert_close(target[0], expected)


def test_without_a_shift_nothing_changes() -> None:
    X, _ = samples()
    W = torch.randn(1, 4, D, dtype=torch.float64)
    _, H = statistics(W, X, X)
    assert torch.equal(corrected_weights(W, torch.zeros_like(W), H, alpha=1.0), W)


def test_solution_times_hessian_is_the_right_hand_side() -> None:
    _, H = statistics(torch.ones(3, 1, D, dtype=torch.float64), *samples(3))
    B = torch.randn(3, 5, D, dtype=torch.float64)
    torch.testing.assert_close(solve(H, B)[0] @ H, B)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_cannot_be_factored_is_refused(value: float) -> None:
    H = torch.full((1, D, D), value)
    with pytest.raises(NumericalError, match="cannot be factored"):
        solve(H, torch.ones(1, 2, D))
