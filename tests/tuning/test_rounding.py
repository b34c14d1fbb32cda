"""Soft rounding: weight and penalty are those of the formula, and the decided weight is what is stored."""

import math
from typing import cast

import pytest
import torch

from aespa_pl.algorithm.quantizer import QuantizedWeight
from aespa_pl.models.weights import projection_weight
from aespa_pl.tuning.parametrization import RoundingPenalty, UpOrDown
from aespa_pl.tuning.training import LearningRates
from aespa_pl.tuning.weights import Recipe
from tests.tuning.tuned import Example, quantize, tune_block

ROWS, COLUMNS = 4, 12


@pytest.mark.parametrize("groups", [1, 3])
def test_it_starts_at_the_weight_itself_and_is_decided_for_its_nearest_integers(groups: int) -> None:
    W = torch.randn(ROWS, COLUMNS)
    start = quantize(W, 2, groups)
    made = UpOrDown(start, W)
    B = made.right_inverse(W)
    with torch.no_grad():
        assert torch.equal(made(B), start.weight())
    assert torch.equal(made.quantized(B).integers, start.integers)
    low = start.each_column(start.scale * (0 - start.zero_point))
    high = start.each_column(start.scale * (3 - start.zero_point))
    soft = made(B.requires_grad_())
    assert torch.allclose(soft, W.clamp(low, high), atol=0.011 * float(start.scale.max()))


def test_weight_and_penalty_are_the_formulas() -> None:
    W, B = torch.randn(ROWS, COLUMNS), 3 * torch.randn(ROWS, COLUMNS)
    start = quantize(W, 3)
    layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight.data = W
    made = UpOrDown(start, W)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", made)
    layer.get_parameter("parametrizations.weight.original").data.copy_(B)
    weight, total = layer.weight.detach(), 0.0
    for r in range(ROWS):
        scale, zero = float(start.scale[r, 0]), float(start.zero_point[r, 0])
        for c in range(COLUMNS):
            h = min(max(1.2 / (1 + math.exp(-float(B[r, c]))) - 0.1, 0.0), 1.0)
            lower = math.floor(float(W[r, c]) / scale + zero)
            expected = scale * (min(max(lower + h, 0), 7) - zero)
            assert float(weight[r, c]) == pytest.approx(expected, abs=1e-5)
            total += 1 - abs(2 * h - 1) ** 11  # the exponent in the middle of 20 and 2
    penalty = RoundingPenalty(0.5, warmup=0.2, beta_start=20.0, beta_end=2.0)
    expected = 0.5 * total / (ROWS * COLUMNS)
    assert float(torch.as_tensor(penalty.of(layer, 60, 100)).detach()) == pytest.approx(expected, rel=1e-4)
    assert penalty.of(layer, 19, 100) == 0
    assert penalty.of(torch.nn.Linear(2, 2), 60, 100) == 0


def test_a_block_whose_rounding_is_learned_keeps_grids_norms_and_biases() -> None:
    example = Example.make("opt", bits=3)
    before = {n: p.clone() for n, p in example.quantized.block.named_parameters() if p.dim() == 1}
    recipe = Recipe(
        lambda _, start, target: UpOrDown(cast(QuantizedWeight, start), target),
        penalty=RoundingPenalty(0.1, 0.2, 20.0, 2.0),
    )
    result = tune_block(example, 6, rates=LearningRates(0.1, 0.1, 0.1), recipe=recipe)
    assert result.error < result.start_error
    after = dict(example.quantized.block.named_parameters())
    assert all(torch.equal(after[name], p) for name, p in before.items())
    moved = 0
    for p in example.layout.projections:
        q, start = result.weights[0][p.name], example.quantized.weights[p.name]
        assert torch.equal(q.scale, start.scale)
        found = projection_weight(example.quantized.block, example.layout, p)
        assert torch.equal(found, q.weight())
        assert int((q.integers.int() - start.integers.int()).abs().max()) <= 1
        moved += int((q.integers != start.integers).sum())
    assert moved > 0
