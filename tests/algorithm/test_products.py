"""Products in the precisions of an accelerator's matrix units."""

import pytest
import torch

from aespa_pl.algorithm.adaround import rounding_loss, start
from aespa_pl.algorithm.grid import min_max_grid
from aespa_pl.algorithm.objectives import Precision, error_product, multiply, multiplying_in, operand
from aespa_pl.algorithm.quantizer import GridFormat

BITS: dict[Precision, int] = {"float32": 24, "bfloat16": 8}
ALL = tuple(BITS)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU (its matrix units) and --gpu")


@pytest.mark.parametrize("precision", ALL)
def test_operand_has_the_bits_of_its_type(precision: Precision) -> None:
    A = torch.randn(64, 65) * 2.0 ** torch.arange(-32, 33)
    with multiplying_in(precision):
        rounded = operand(A).double()
    mantissa, exponent = torch.frexp(A.double())
    expected = torch.ldexp((mantissa * 2.0 ** BITS[precision]).round(), exponent - BITS[precision])
    # a tie may go to either side
    assert torch.all((rounded - A.double()).abs() <= (expected - A.double()).abs())
    scaled = torch.ldexp(rounded, BITS[precision] - exponent)
    assert torch.equal(scaled, scaled.round())


@pytest.mark.parametrize("precision", ALL)
def test_operand_leaves_what_it_was_given(precision: Precision) -> None:
    A = torch.randn(5, 6)
    before = A.clone()
    with multiplying_in(precision):
        once = operand(A)
        again = operand(once)
    assert torch.equal(A, before)
    assert torch.equal(again, once)


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("precision", ALL)
def test_product_is_that_of_the_rounded_operands(precision: Precision, batch: tuple[int, ...]) -> None:
    A, B = torch.randn(*batch, 20, 300), torch.randn(*batch, 300, 30)
    with multiplying_in(precision):
        found = multiply(A, operand(B), out=torch.empty(*batch, 20, 30))
        expected = operand(A).double() @ operand(B).double()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("with_other_side", [False, True])
def test_loss_and_gradient_are_as_near_as_the_operands(with_other_side: bool) -> None:
    precision: Precision = "bfloat16"
    W, X, K = torch.randn(2, 8, 40), torch.randn(40, 200), torch.randn(2, 50, 8)
    H, G = (X @ X.T)[None] / 100, K.mT @ K if with_other_side else None
    grid = min_max_grid(W, torch.ones(40), GridFormat(2, symmetric=False, group_size=None))
    rounding, B = start(W, W, grid)
    exact = rounding_loss(B, rounding, H, G, weight=1.0, beta=4.0)
    with multiplying_in(precision):
        near = rounding_loss(B, rounding, operand(H), G, weight=1.0, beta=4.0)
    unit = 2.0 ** -BITS[precision]
    assert not torch.equal(near.gradient, exact.gradient)
    assert float((near.gradient - exact.gradient).norm() / exact.gradient.norm()) < 4 * unit
    assert float(near.reconstruction) == pytest.approx(float(exact.reconstruction), rel=4 * unit)
    assert torch.equal(near.penalty, exact.penalty)
    dW = rounding.base
    with multiplying_in(precision):
        product = error_product(dW, operand(H), G)
    expected = error_product(dW, H, G)
    assert 0 < float((product - expected).norm() / expected.norm()) < 4 * unit


@pytest.mark.parametrize(
    ("precision", "setting"), [("float32", "highest"), ("tf32", "high"), ("bfloat16", "medium")]
)
def test_matrix_units_are_allowed_inside_only(precision: Precision, setting: str) -> None:
    before = torch.get_float32_matmul_precision()

    def fail() -> None:
        with multiplying_in(precision):
            assert torch.get_float32_matmul_precision() == setting
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert torch.get_float32_matmul_precision() == before


@GPU
@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_matrix_units_round_as_the_cpu_path_does(precision: Precision) -> None:
    A, B = torch.randn(20, 300), torch.randn(300, 30)
    with multiplying_in(precision):
        expected = multiply(A, operand(B))
        found = multiply(A.cuda(), operand(B.cuda())).cpu()
    # some units cut what others round
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0.1)
