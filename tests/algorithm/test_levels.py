"""Grids whose integers are levels at several distances: every step takes the nearest, and no other number."""

import pytest
import torch
from torch import Tensor

from aespa_pl.algorithm.adaround import SoftRounding, decide, rectified_sigmoid, start
from aespa_pl.algorithm.descent import descend
from aespa_pl.algorithm.grid import search_grid
from aespa_pl.algorithm.grid_types import LEVELS, TYPES, nearest, neighbours
from aespa_pl.algorithm.objectives import reconstruction_loss
from aespa_pl.algorithm.optq import update_weights
from aespa_pl.algorithm.quantizer import Grid, GridFormat, dequantize, quantize

COLUMNS = 32
LEVEL = torch.tensor(LEVELS, dtype=torch.float32)


def problem(name: str = "IQ4_NL", rows: int = 4) -> tuple[Tensor, Tensor, Grid]:
    """Return weights, Hessian and grid; factors of columns are no powers of 2."""
    torch.manual_seed(0)
    X = torch.randn(1, COLUMNS, 3 * COLUMNS) + torch.randn(1, COLUMNS, 1)
    W, H = torch.randn(2, rows, COLUMNS), X @ X.mT
    grid = search_grid(W, H, torch.rand(COLUMNS) + 0.5, GridFormat.of(TYPES[name]))[0]
    return W, H, grid.in_half(torch.ones(2, rows))


def assert_levels(integers: Tensor) -> None:
    assert bool(torch.isin(integers, LEVEL.to(integers)).all())


def test_the_nearest_level_is_that_of_all_distances() -> None:
    value = torch.cat([torch.linspace(-300, 500, 10_001), torch.arange(-20, 1040) / 4])
    found = nearest(value, LEVELS)
    assert_levels(found)
    assert torch.equal((found - value).abs(), (LEVEL - value[:, None]).abs().amin(1))
    assert_levels(nearest(torch.tensor([torch.nan, torch.inf, -torch.inf]), LEVELS))


def test_neighbours_are_the_levels_around_a_value() -> None:
    value = torch.tensor([-3.0, 0.0, 22.9, 23.0, 120.0, 239.0, 240.0, 300.0])
    lower, above = neighbours(value, LEVELS)
    assert lower.tolist() == [-1, 0, 0, 23, 117, 216, 240, 240]
    assert above.tolist() == [0, 23, 23, 44, 128, 240, 241, 241]


@pytest.mark.parametrize("name", ["IQ4_NL", "IQ4_XS"])
def test_rounding_takes_the_level_with_the_least_error(name: str) -> None:
    W, H, grid = problem(name)
    every = torch.stack([dequantize(torch.full_like(W, float(level)), grid) - W for level in LEVELS])
    error = dequantize(quantize(W, grid), grid) - W
    torch.testing.assert_close(error.abs(), every.abs().amin(0), rtol=1e-4, atol=1e-6)
    updated, integers, _ = update_weights(W, H, grid)
    assert_levels(integers)
    assert torch.equal(integers, quantize(updated, grid))


@pytest.mark.parametrize("coupled", [False, True])
def test_no_single_level_is_better_after_the_descent(coupled: bool) -> None:
    W, H, grid = problem(rows=2)
    G = torch.tensor([[2.0, 0.5], [0.5, 1.0]]).expand(2, 2, 2) if coupled else None
    before = quantize(W, grid).to(torch.uint8)
    found = descend(before, W, grid, H, G, passes=50)
    assert_levels(found.integers)
    least = reconstruction_loss(dequantize(found.integers, grid) - W, H, G).sum()
    assert least < reconstruction_loss(dequantize(before, grid) - W, H, G).sum()
    if not coupled:  # a unit's pass of little gain may be its last where rows are coupled
        for place in range(0, W.numel(), 7):
            for level in LEVELS:
                other = found.integers.clone()
                other.view(-1)[place] = level
                loss = reconstruction_loss(dequantize(other, grid) - W, H, G).sum()
                assert loss > least * 0.995


def test_learned_rounding_is_between_the_neighbours_of_each_weight() -> None:
    W, H, grid = problem()
    updated, _, _ = update_weights(W, H, grid)
    rounding, B = start(W, 1.3 * updated, grid)  # some beyond the last level

    def soft(h: Tensor, of: SoftRounding) -> Tensor:
        assert of.gain is not None
        return of.base + of.gain * h + W

    for up in (-9.0, 9.0):
        q = decide(torch.full_like(B, up), rounding)
        assert_levels(q)
        torch.testing.assert_close(soft(torch.full_like(B, float(up > 0)), rounding), dequantize(q, grid))
    ends = [dequantize(torch.full_like(W, float(q)), grid) for q in (LEVELS[0], LEVELS[-1])]
    inside = torch.maximum(torch.minimum(1.3 * updated, torch.maximum(*ends)), torch.minimum(*ends))
    torch.testing.assert_close(soft(rectified_sigmoid(B), rounding), inside, rtol=1e-4, atol=1e-5)
