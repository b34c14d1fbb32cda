"""Learned ranges: weight and gradients are those of the formula, element by element in float64."""

import math

import pytest
import torch
from torch import Tensor

from aespa_pl.tuning.omniquant import Clipped
from tests.tuning.tuned import quantize

ROWS, COLUMNS = 4, 12


def made(W: Tensor, bits: int, groups: int, *, symmetric: bool) -> Clipped:
    found = Clipped(quantize(W, bits, groups), W, symmetric=symmetric)
    found.strengths.data.uniform_(-1.5, 2.0)  # far enough that weights are clipped
    return found


def grid(W: list[float], strengths: list[float], bits: int, *, symmetric: bool) -> tuple[float, float]:
    """Return scale and zero point (not yet rounded) of one row's group."""
    beta, gamma = (1 / (1 + math.exp(-x)) for x in (strengths[0], strengths[-1]))
    low, high = min(*W, 0.0), max(*W, 0.0)
    if symmetric:
        high = max(high, -low)
        low = -high
    scale = (gamma * high - beta * low) / (2**bits - 1)
    scale = float(torch.tensor(scale).half())
    return scale, 2 ** (bits - 1) if symmetric else -beta * low / scale


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "groups"), [(2, 1), (3, 3), (8, 1)])
def test_weight_is_the_papers_formula(bits: int, groups: int, symmetric: bool) -> None:
    W = torch.randn(ROWS, COLUMNS)
    clipped = made(W, bits, groups, symmetric=symmetric)
    found, stored = clipped(W).detach(), clipped.quantized(W)
    size = COLUMNS // groups
    for r in range(ROWS):
        for g in range(groups):
            part = W[r, g * size : (g + 1) * size].tolist()
            strengths = clipped.strengths[:, r, g].tolist()
            scale, zero = grid(part, strengths, bits, symmetric=symmetric)
            for c, w in enumerate(part):
                q = min(max(round(w / scale) + round(zero), 0), 2**bits - 1)
                assert int(stored.integers[r, g * size + c]) == q
                expected = scale * (q - round(zero))
                assert float(found[r, g * size + c]) == pytest.approx(expected, rel=1e-5)
    assert torch.equal(found, stored.weight())
    assert torch.equal(stored.scale, stored.scale.half().float())


def test_gradients_of_the_strengths_equal_the_formula() -> None:
    """Every rounding passes the gradient on; clamped weights move with the ends of the range."""
    W, upstream = torch.randn(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS)
    clipped = made(W, 2, 1, symmetric=False)
    clipped(W).backward(upstream)
    assert clipped.strengths.grad is not None
    clamped = 0
    for r in range(ROWS):
        strengths = clipped.strengths[:, r, 0].tolist()
        scale, zero = grid(W[r].tolist(), strengths, 2, symmetric=False)
        ends = [min(float(W[r].min()), 0.0), max(float(W[r].max()), 0.0)]
        for end in (0, 1):
            sigmoid = 1 / (1 + math.exp(-strengths[end]))
            slope = sigmoid * (1 - sigmoid)
            d_scale = slope * (ends[1] if end else -ends[0]) / 3
            d_low = 0.0 if end else slope * ends[0]
            total = 0.0
            for c in range(COLUMNS):
                w, g = float(W[r, c]), float(upstream[r, c])
                unclamped = round(w / scale) + round(zero)
                if 0 <= unclamped <= 3:
                    total += g * d_scale * (unclamped - round(zero) - w / scale)
                else:
                    clamped += 1
                    q = min(max(unclamped, 0), 3)
                    total += g * (d_scale * (q - round(zero) + zero) + d_low)
            assert float(clipped.strengths.grad[end, r, 0]) == pytest.approx(total, rel=1e-3, abs=1e-4)
    assert clamped > 5


def test_a_row_of_zeros_stays_zero() -> None:
    W = torch.zeros(ROWS, COLUMNS)
    for symmetric in (False, True):
        clipped = made(W, 3, 1, symmetric=symmetric)
        assert torch.equal(clipped(W), W)
