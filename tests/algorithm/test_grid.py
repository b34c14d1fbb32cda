"""The search finds a grid as good as trying every candidate one by one finds."""

import math

import pytest
import torch
from torch import Tensor

from aespa_pl.algorithm.grid import min_max_grid, search_grid, weighted_grid
from aespa_pl.algorithm.quantizer import Grid, GridFormat
from tests import reference


def problem(heads: int = 1, rows: int = 3, columns: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    X = torch.randn(heads, columns, 40, dtype=torch.float64)
    W = torch.randn(heads, rows, columns, dtype=torch.float64)
    return W, X @ X.transpose(1, 2), torch.rand(columns, dtype=torch.float64) + 0.5


def by_hand(w: Tensor, H: Tensor, zeta: Tensor, bits: int, *, symmetric: bool) -> float:
    """Return the loss of the best candidate of one row, and nothing clever."""
    v, largest = w / zeta, 2**bits - 1
    low, high = min(float(v.min()), 0), max(float(v.max()), 0)
    if symmetric:
        high = max(-low, high)
        low = -high
    full = (high - low) / largest
    zeros = [2 ** (bits - 1)] if symmetric else [math.floor(-low / full), math.ceil(-low / full)]
    return min(
        loss_on(w, H, zeta, full * percent / 100, zero, bits)
        for zero in zeros
        for percent in range(100, 0, -1)
    )


def loss_on(w: Tensor, H: Tensor, zeta: Tensor, scale: float, zero: float, bits: int) -> float:
    """Return the loss of one row on a grid."""
    q = reference.nearest(w / zeta, scale, zero, 2**bits - 1)
    error = zeta * scale * (q - zero) - w
    return float(error @ H @ error)


def grid_of(grid: Grid, row: int, group: int, head: int = 0) -> tuple[float, float]:
    """Return scale and zero point of one row and group."""
    return float(grid.scale[head, row, group]), float(grid.zero_point[head, row, group])


def assert_as_good(loss: float, least: float) -> None:
    """Few columns: the approximation of H is exact, so no candidate is better."""
    assert loss <= least * (1 + 1e-9)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 4])
def test_search_is_as_good_as_trying_every_candidate(bits: int, *, symmetric: bool) -> None:
    W, H, zeta = problem(heads=2)
    found = search_grid(W, H, zeta, GridFormat(bits, symmetric=symmetric, group_size=None))[0]
    for head in range(2):
        for row in range(3):
            scale, zero = grid_of(found, row, 0, head)
            loss = loss_on(W[head, row], H[head], zeta, scale, zero, bits)
            assert_as_good(loss, by_hand(W[head, row], H[head], zeta, bits, symmetric=symmetric))
            assert zero == 2 ** (bits - 1) or not symmetric


@pytest.mark.parametrize("group_size", [None, 4])
@pytest.mark.parametrize("symmetric", [False, True])
def test_weighted_errors_need_no_matrix(group_size: int | None, *, symmetric: bool) -> None:
    W, _, zeta = problem(heads=2)
    D = torch.rand(8, dtype=torch.float64)
    found = weighted_grid(W, D, zeta, GridFormat(3, symmetric=symmetric, group_size=group_size))
    size = group_size or 8
    for head in range(2):
        for row in range(3):
            for g, part in enumerate(slice(i, i + size) for i in range(0, 8, size)):
                problem_of = W[head, row, part], D[part].diag(), zeta[part]
                loss = loss_on(*problem_of, *grid_of(found, row, g, head), 3)
                assert_as_good(loss, by_hand(*problem_of, 3, symmetric=symmetric))


@pytest.mark.parametrize("rows_at_once", [1, 2, 3])
def test_groups_are_searched_on_their_own_columns(monkeypatch: pytest.MonkeyPatch, rows_at_once: int) -> None:
    monkeypatch.setattr("aespa_pl.algorithm.grid.MOST_GRIDS", rows_at_once * 2 * 200)
    W, H, zeta = problem()
    found = search_grid(W, H, zeta, GridFormat(2, symmetric=False, group_size=4))[0]
    assert found.scale.shape == (1, 3, 2)
    for row in range(3):
        for g, part in enumerate((slice(0, 4), slice(4, 8))):
            w, h, scale, zero = W[0, row, part], H[0, part, part], *grid_of(found, row, g)
            loss = loss_on(w, h, zeta[part], scale, zero, 2)
            assert_as_good(loss, by_hand(w, h, zeta[part], 2, symmetric=False))


def test_shared_hessian_equals_one_for_each_head() -> None:
    W, H, zeta = problem(heads=3)
    shared = search_grid(W, H[:1], zeta, GridFormat(2, symmetric=False, group_size=None))[0]
    copied = search_grid(W, H[:1].repeat(3, 1, 1), zeta, GridFormat(2, symmetric=False, group_size=None))[0]
    torch.testing.assert_close(shared.scale, copied.scale)


def test_a_row_of_zeros_gets_a_usable_grid() -> None:
    W, H, zeta = problem()
    W[0, 1] = 0
    for g in (
        min_max_grid(W, zeta, GridFormat(2, symmetric=False, group_size=None)),
        search_grid(W, H, zeta, GridFormat(2, symmetric=False, group_size=None))[0],
    ):
        assert bool((g.scale > 0).all())
        assert bool(g.scale.isfinite().all())


def test_min_max_grid_reaches_both_ends_and_zero() -> None:
    W = torch.tensor([[[0.5, 1.0, 2.0, 3.0], [-3.0, -1.0, -0.5, 0.0]]], dtype=torch.float64)
    g = min_max_grid(W, torch.ones(4, dtype=torch.float64), GridFormat(2, symmetric=False, group_size=None))
    assert g.scale.flatten().tolist() == [1, 1]
    assert g.zero_point.flatten().tolist() == [0, 3]


def test_min_max_grid_covers_the_weights_divided_by_zeta_and_rounds_the_zero_point() -> None:
    v = torch.tensor([[-1.0, 0.2, 1.5, 2.0], [0.5, 1.0, 2.0, 3.0], [-3.0, -2.0, -1.0, -0.5]])
    zeta = torch.tensor([2.0, 0.5, 1.0, 4.0])
    g = min_max_grid((v * zeta)[None], zeta, GridFormat(3, symmetric=False, group_size=None))
    # 0 is always covered, also where all weights of a row have one sign
    torch.testing.assert_close(g.scale.flatten(), torch.tensor([3.0, 3.0, 3.0]) / 7)
    assert g.zero_point.flatten().tolist() == [2, 0, 7]  # 7 / 3 is rounded


@pytest.mark.parametrize("sign", [1, -1])
def test_rows_of_one_sign_are_searched_like_all_others(sign: int) -> None:
    """Floor and ceiling of their zero point are the same, but not those of the other rows."""
    W, H, zeta = problem(rows=12)
    W[0, :4] = sign * W[0, :4].abs() - sign * 0.1 * W[0, :4].abs().amin(-1, keepdim=True)
    found = search_grid(W, H, zeta, GridFormat(2, symmetric=False, group_size=None))[0]
    for row in range(12):
        loss = loss_on(W[0, row], H[0], zeta, *grid_of(found, row, 0), 2)
        assert_as_good(loss, by_hand(W[0, row], H[0], zeta, 2, symmetric=False))


def test_zero_points_are_integers_of_the_range() -> None:
    """In float32 -low / (-low / 7) may be 7.0000005, whose ceiling is 8."""
    W = -torch.rand(1, 500, 4) - 0.3
    low = W.amin(-1)
    assert bool((low / (low / 7) > 7).any())
    H, zeta = torch.eye(4)[None], torch.ones(4)
    found = search_grid(W, H, zeta, GridFormat(3, symmetric=False, group_size=None))[0]
    assert bool((found.zero_point <= 7).all())


def test_the_whole_range_and_a_hundredth_of_it_can_be_the_best() -> None:
    W = torch.tensor([[[-1.0, 0.0, 1.0, 2.0], [100.0, 1.0, 2 / 3, 1 / 3]]], dtype=torch.float64)
    H = torch.eye(4, dtype=torch.float64)[None]
    H[0, 0, 0] = 1e-9  # the second row's outlier is of no matter
    zeta = torch.ones(4, dtype=torch.float64)
    found = search_grid(W, H, zeta, GridFormat(2, symmetric=False, group_size=None))[0]
    torch.testing.assert_close(found.scale.flatten().tolist(), [1.0, 1 / 3])
