"""Weights of tokens: massive activations, lost or made by the quantization, and the first token."""

import math

import pytest
import torch
from torch import Tensor

from aespa_pl.algorithm.massive import error_divisors, token_weights
from tests import massive


def segments(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return targets and outputs of three segments of 75 tokens, some of them massive."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(3, 75, 8, generator=generator, dtype=torch.float64)
    output = target + 0.3 * torch.randn(3, 75, 8, generator=generator, dtype=torch.float64)
    target[0, 0] *= 200
    target[1, 30] *= 200
    output[1, 40] *= 200
    target[2, :2] *= 5
    return target, output


def test_divisors_and_weights_are_those_of_the_direct_formula() -> None:
    target, output = segments()
    divisors, weights = error_divisors(target, output), token_weights(target, output)
    for i in range(3):
        assert divisors[i].tolist() == pytest.approx(massive.divisors(target[i], output[i]))
        torch.testing.assert_close(weights[i], massive.weights(target[i], output[i]))
    assert (weights < 1).sum() > 3  # the formula's cases occur
    assert (weights == 1).sum() > 200


def shares(target: Tensor, output: Tensor) -> Tensor:
    return (output - target).square().mean(-1) / error_divisors(target, output)


def test_a_lost_massive_activation_costs_more_than_any_other_lost_token() -> None:
    target = torch.ones(100, 4)
    target[50] = 1000.0
    lost, usual = target.clone(), target.clone()
    lost[50], usual[70] = 0.0, 0.0
    # a mean square of 1e6, of which sqrt(1e6 * 10) is the size that counts
    assert float(shares(target, lost).sum()) == pytest.approx(1e6 / math.sqrt(1e6 * 10))
    assert float(shares(target, usual).sum()) == pytest.approx(1.0)


def test_a_massive_activation_that_the_original_lacks_costs_like_one_token() -> None:
    target = torch.ones(100, 4)
    output = target.clone()
    output[60] = 1000.0
    assert float(shares(target, output).sum()) == pytest.approx(1.0, rel=0.01)


def test_the_first_token_counts_like_a_share_of_the_segment() -> None:
    target = torch.ones(200, 4)
    output = target.clone()
    output[0] = 0.0
    assert float(shares(target, output).sum()) == pytest.approx(0.04 * 200)


def test_tokens_of_zeros_have_finite_weights() -> None:
    zeros = torch.zeros(2, 5, 4)
    assert (error_divisors(zeros, zeros) > 0).all()
    assert token_weights(zeros, zeros).isfinite().all()


def test_no_gradient_goes_through_the_divisor() -> None:
    target = torch.ones(10, 4)
    output = (2 * target).requires_grad_()
    assert not error_divisors(target, output).requires_grad


def test_where_most_targets_are_zero_the_others_count() -> None:
    target = torch.zeros(1, 8, 4)
    target[:, 2:5] = 1
    assert torch.equal(token_weights(target, target)[:, 2:5], torch.ones(1, 3))
