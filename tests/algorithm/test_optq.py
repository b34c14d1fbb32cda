import pytest
import torch
from torch import Tensor

from aespa_pl.algorithm import optq
from aespa_pl.algorithm.grid import search_grid
from aespa_pl.algorithm.objectives import reconstruction_loss
from aespa_pl.algorithm.optq import factored_for_all, update_weights
from aespa_pl.algorithm.quantizer import Grid, GridFormat, dequantize, quantize
from tests import reference


def problem(
    heads: int = 2, rows: int = 3, columns: int = 10, group_size: int | None = None
) -> tuple[Tensor, Tensor, Grid]:
    """Columns of very different sizes, in an order that each head has for itself."""
    X = torch.randn(heads, columns, 60, dtype=torch.float64)
    orders = torch.stack([torch.randperm(columns) for _ in range(heads)])
    X = X * torch.logspace(0, 1, columns, dtype=torch.float64)[orders][..., None]
    H = X @ X.transpose(1, 2)
    W = torch.randn(heads, rows, columns, dtype=torch.float64)
    zeta = torch.rand(columns, dtype=torch.float64) + 0.5
    return W, H, search_grid(W, H, zeta, GridFormat(2, symmetric=False, group_size=group_size))[0]


@pytest.mark.parametrize("group_size", [None, 5])
@pytest.mark.parametrize(("lazy", "part"), [(128, 16), (128, 4), (7, 3), (4, 16), (1, 1)])
def test_update_equals_solving_for_the_columns_left(
    lazy: int, part: int, group_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optq, "LAZY_COLUMNS", lazy)
    monkeypatch.setattr(optq, "LAZY_PART", part)
    W, H, grid = problem(group_size=group_size)
    updated, integers, added = update_weights(W, H, grid)
    assert float(added.max()) == 0
    for head in range(2):
        for row in range(3):
            step, zero = grid.step()[head, row], grid.zero()[head, row]
            expected, q = reference.optq_row(W[head, row], H[head], step, zero, grid.largest)
            torch.testing.assert_close(updated[head, row], expected)
            assert torch.equal(integers[head, row], q)


def test_heads_with_a_shared_hessian_equal_heads_with_a_copy() -> None:
    W, H, grid = problem()
    shared = update_weights(W, H[:1], grid)
    copied = update_weights(W, H[:1].repeat(2, 1, 1), grid)
    torch.testing.assert_close(shared[0], copied[0])
    assert torch.equal(shared[1], copied[1])


@pytest.mark.parametrize("heads", [1, 2])
def test_factors_that_are_used_again_give_the_same_update(heads: int) -> None:
    W, H, grid = problem(heads)
    for found, expected in zip(
        update_weights(W, H, grid, factored_for_all(H)), update_weights(W, H, grid), strict=True
    ):
        assert torch.equal(found, expected)


def test_factors_of_many_heads_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    W, H, grid = problem(heads=3)
    whole = update_weights(W, H, grid)
    monkeypatch.setattr(optq, "CPU_CHUNK", 100)  # one Hessian
    assert factored_for_all(H[:1]) is not None
    assert factored_for_all(H) is None
    assert torch.equal(update_weights(W, H, grid)[1], whole[1])


def test_integers_are_the_rounding_of_the_updated_weights() -> None:
    W, H, grid = problem()
    updated, integers, _ = update_weights(W, H, grid)
    assert torch.equal(integers, quantize(updated, grid))


def test_compensation_lowers_the_loss_of_nearest_rounding() -> None:
    W, H, grid = problem(rows=50, columns=40)
    _, integers, _ = update_weights(W, H, grid)
    ours = reconstruction_loss(dequantize(integers, grid) - W, H).sum()
    nearest = reconstruction_loss(dequantize(quantize(W, grid), grid) - W, H).sum()
    assert ours < 0.95 * nearest
