import pytest
import torch

from aespa_pl.algorithm.grid_types import round_to_half
from aespa_pl.algorithm.quantizer import Grid, dequantize, quantize
from tests import reference


def grid(bits: int = 2, groups: int = 1, rows: int = 3, columns: int = 8) -> Grid:
    scale = torch.rand(1, rows, groups, dtype=torch.float64) + 0.2
    zero = torch.randint(0, 2**bits, (1, rows, groups)).double()
    return Grid(scale, zero, torch.rand(columns, dtype=torch.float64) + 0.5, bits)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_integers_are_those_of_plain_nearest_rounding(bits: int) -> None:
    g = grid(bits)
    W = torch.randn(1, 3, 8, dtype=torch.float64)
    q = quantize(W, g)
    for row in range(3):
        scale, zero = float(g.scale[0, row, 0]), float(g.zero_point[0, row, 0])
        expected = reference.nearest(W[0, row] / g.zeta, scale, zero, 2**bits - 1)
        assert torch.equal(q[0, row], expected)


def test_halves_go_to_the_even_neighbour_whatever_the_zero_point() -> None:
    W = torch.tensor([[[-1.5, -0.5, 0.5, 1.5, 2.5]] * 2])
    ones = torch.ones(1, 2, 1)
    q = quantize(W, Grid(ones, torch.tensor([[[2.0], [3.0]]]), torch.ones(5), 3))
    assert q[0].tolist() == [[0, 2, 2, 4, 4], [1, 3, 3, 5, 5]]


def test_each_group_of_columns_has_its_own_scale_and_zero_point() -> None:
    g = grid(groups=4)
    q = torch.randint(0, 4, (1, 3, 8)).double()
    W = dequantize(q, g)
    for row in range(3):
        for column in range(8):
            s, z = g.scale[0, row, column // 2], g.zero_point[0, row, column // 2]
            expected = float(s * g.zeta[column] * (q[0, row, column] - z))
            assert float(W[0, row, column]) == pytest.approx(expected)


def test_what_the_grid_holds_is_quantized_without_error() -> None:
    g = grid(bits=3, groups=2)
    q = torch.randint(0, 8, (1, 3, 8)).double()
    assert torch.equal(quantize(dequantize(q, g), g), q)


def test_rounded_scales_survive_float16_and_stay_positive() -> None:
    scale = torch.tensor([1e-12, 3.14159, 1e9, 2e-5])
    rounded = round_to_half(scale)
    assert torch.equal(rounded.half().float(), rounded)
    assert bool((rounded > 0).all())
    assert bool(rounded.isfinite().all())
    assert float(rounded[1]) == pytest.approx(3.14159, rel=1e-3)
    assert float(rounded[3]) == pytest.approx(2e-5, rel=1e-2)  # subnormal
