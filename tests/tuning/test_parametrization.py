"""Parametrized weights start at their integers, and have the gradients that a formula says."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from aespa_pl.tuning import parametrization
from aespa_pl.tuning.parametrization import Stored, StraightThrough
from tests.tuning.tuned import quantize

ROWS, COLUMNS = 5, 12


def layer(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = weight
    return linear


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("bits", [2, 3, 8])
def test_training_starts_at_the_quantized_weight_bit_for_bit(bits: int, groups: int) -> None:
    W = torch.randn(ROWS, COLUMNS)
    start = quantize(W, bits, groups)
    start.integers[0, 0] = (int(start.integers[0, 0]) + 2) % 2**bits  # far from the nearest
    step = start.scale.repeat_interleave(COLUMNS // groups, 1)
    zero = start.zero_point.repeat_interleave(COLUMNS // groups, 1)
    expected = step * (start.integers.float() - zero)
    for target in (W, start.weight()):
        made = StraightThrough(start, target)
        linear = layer(W.clone())
        parametrize.register_parametrization(linear, "weight", made)
        assert torch.equal(linear.weight, expected)
        again = made.quantized(linear.get_parameter("parametrizations.weight.original").detach())
        assert torch.equal(again.integers, start.integers)
        assert torch.equal(again.scale, start.scale)
        assert torch.equal(again.zero_point, start.zero_point)
        assert again.integers.dtype == torch.uint8


def test_latent_values_are_as_near_to_the_next_integer_as_the_target() -> None:
    W = torch.randn(ROWS, COLUMNS)
    start = quantize(W, bits=2)
    latent = StraightThrough(start, W).right_inverse(W)
    exact = (W.double() / start.scale.double() + start.zero_point.double()).clamp(-0.49, 3.49)
    near = (exact - start.integers).abs() < 0.48
    assert near.float().mean() > 0.9
    assert torch.allclose(latent.double()[near], exact[near], atol=1e-5)  # float32 of about 3


@pytest.mark.parametrize("chunk", [1, 2 * COLUMNS, 2**17])
@pytest.mark.parametrize("groups", [1, 3])
def test_gradients_equal_the_formula(groups: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parametrization, "CPU_CHUNK", chunk)
    W = torch.randn(ROWS, COLUMNS)
    start = quantize(W, 2, groups)
    made = StraightThrough(start, W)
    latent = made.right_inverse(W)
    latent[0, 0], latent[1, 1] = -0.7, 3.6  # rounded beyond 0 .. 3, and clamped
    latent.requires_grad_()
    upstream = torch.randn(ROWS, COLUMNS)
    made(latent).backward(upstream)
    assert latent.grad is not None
    assert made.log_scale.grad is not None
    size = COLUMNS // groups
    to_scale = torch.zeros(ROWS, groups, dtype=torch.float64)
    for r in range(ROWS):
        for c in range(COLUMNS):
            g, s = float(upstream[r, c]), float(start.scale[r, c // size])
            nearest = round(float(latent.detach()[r, c]))
            q = min(max(nearest, 0), 3)
            weight = s * (q - float(start.zero_point[r, c // size]))
            to_scale[r, c // size] += g * weight  # d s / d log s = s
            wanted = g * s if q == nearest else 0.0
            assert float(latent.grad[r, c]) == pytest.approx(wanted, rel=1e-5)
    assert torch.allclose(made.log_scale.grad.double(), to_scale, atol=1e-5)


def test_latent_values_that_stay_leave_the_gradient_of_the_scales() -> None:
    W = torch.randn(ROWS, COLUMNS)
    start = quantize(W, bits=3)
    made = StraightThrough(start, start.weight())
    upstream = torch.randn(ROWS, COLUMNS)
    made(made.right_inverse(W)).backward(upstream)
    weight = start.scale.double() * (start.integers.double() - start.zero_point.double())
    wanted = (upstream.double() * weight).sum(1, keepdim=True)
    assert made.log_scale.grad is not None
    assert torch.allclose(made.log_scale.grad.double(), wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_stored_parameter_has_values_of_its_type_and_passes_gradients(dtype: torch.dtype) -> None:
    value = torch.randn(50, requires_grad=True)
    rounded = Stored(dtype)(value)
    assert torch.equal(rounded, value.detach().to(dtype).float())
    rounded.sum().backward()
    assert value.grad is not None
    assert torch.equal(value.grad, torch.ones(50))
