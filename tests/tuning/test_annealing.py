"""Soft integers have the values and gradients of the formula, and end at the nearest integers."""

import pytest
import torch

from aespa_pl.tuning.parametrization import StraightThrough, sharpness_at, softly_rounded
from tests.tuning.tuned import quantize


@pytest.mark.parametrize("sharpness", [4.0, 37.0, 400.0])
def test_soft_integers_and_gradients_are_the_formula(sharpness: float) -> None:
    v = torch.linspace(-0.499, 3.499, 401).requires_grad_()
    upstream = torch.randn(401)
    found = softly_rounded(v, sharpness, 3)
    found.backward(upstream)
    exact = v.detach().double().requires_grad_()
    candidates = torch.arange(4.0, dtype=torch.float64)
    near = (candidates - exact.detach().round()[:, None]).abs() < 1.5
    distance = (exact[:, None] - candidates).square()
    wanted = (-sharpness * distance).masked_fill(~near, -torch.inf).softmax(-1) @ candidates
    wanted.backward(upstream.double())
    assert v.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(v.grad.double(), exact.grad, rtol=1e-2, atol=1e-4)


def test_values_far_outside_of_the_range_stay_at_its_ends() -> None:
    v = torch.tensor([-50.0, 50.0], requires_grad=True)
    found = softly_rounded(v, 400.0, 3)
    found.sum().backward()
    assert found.tolist() == [0.0, 3.0]
    assert v.grad is not None
    assert v.grad.tolist() == [0.0, 0.0]


def test_integers_are_soft_only_where_a_gradient_is_wanted() -> None:
    W = torch.randn(5, 12)
    start = quantize(W, 2, 3)
    made = StraightThrough(start, W)
    latent = made.right_inverse(W).requires_grad_()
    hard = made(latent).detach()
    made.sharpness = sharpness_at(0, 100)
    assert not torch.equal(made(latent), hard)
    with torch.no_grad():
        assert torch.equal(made(latent), hard)
    made(latent).sum().backward()
    assert made.log_scale.grad is not None
    assert bool((made.log_scale.grad != 0).all())


def test_sharpness_rises_to_the_end() -> None:
    found = [sharpness_at(step, 200) for step in range(200)]
    assert found[0] == pytest.approx(4)
    assert found[95] == pytest.approx(40)
    assert found[190:] == pytest.approx([400] * 10)
    assert found[:191] == sorted(set(found[:191]))
