import torch
from torch import Tensor

from aespa_pl.algorithm.grid import min_max_grid
from aespa_pl.algorithm.objectives import reconstruction_loss
from aespa_pl.algorithm.quantizer import Grid, dequantize, quantize
from aespa_pl.algorithm.zfold import fit_grids, least_squares_zeta

FORM = {"bits": 2, "symmetric": False, "group_size": None}


def problem() -> tuple[list[Tensor], list[Tensor]]:
    """Two projections of one input whose columns have very different sizes."""
    sizes = torch.logspace(-1, 1, 12, dtype=torch.float64)
    weights = [torch.randn(1, 20, 12, dtype=torch.float64) * sizes for _ in range(2)]
    X = torch.randn(12, 80, dtype=torch.float64)
    return weights, [(X @ X.T)[None]] * 2


def loss(weights: list[Tensor], hessians: list[Tensor], grids: list[Grid]) -> float:
    return sum(
        float(reconstruction_loss(dequantize(quantize(W, g), g) - W, H).sum())
        for W, H, g in zip(weights, hessians, grids, strict=True)
    )


def test_zeta_is_the_least_squares_factor_of_each_column() -> None:
    weights, _ = problem()
    zeta = torch.rand(12, dtype=torch.float64) + 0.5
    grids = [min_max_grid(W, zeta, **FORM) for W in weights]
    fitted = least_squares_zeta(weights, grids)
    for j in range(12):
        w = torch.cat([W[0, :, j] for W in weights])
        value = torch.cat(
            [
                (dequantize(quantize(W, g), g) / zeta)[0, :, j]
                for W, g in zip(weights, grids, strict=True)
            ]
        )
        # Least squares by the library; a column that is quantized to 0 everywhere keeps its factor.
        expected = torch.linalg.lstsq(value[:, None], w[:, None]).solution.item() or float(zeta[j])
        torch.testing.assert_close(float(fitted[j]), expected)


def test_zeta_stays_positive_and_finite_for_a_dead_column() -> None:
    weights, hessians = problem()
    for W in weights:
        W[..., 3] = 0
    for g in fit_grids(weights, hessians, **FORM, with_zeta=True, max_rounds=30):
        assert bool((g.zeta > 0).all())
        assert bool(g.zeta.isfinite().all())


def test_projections_of_one_input_share_zeta() -> None:
    weights, hessians = problem()
    first, second = fit_grids(weights, hessians, **FORM, with_zeta=True, max_rounds=30)
    assert torch.equal(first.zeta, second.zeta)


def test_without_zeta_it_is_one() -> None:
    weights, hessians = problem()
    for g in fit_grids(weights, hessians, **FORM, with_zeta=False, max_rounds=30):
        assert bool((g.zeta == 1).all())


def test_zeta_lowers_the_loss_of_unequal_columns() -> None:
    weights, hessians = problem()
    plain = fit_grids(weights, hessians, **FORM, with_zeta=False, max_rounds=30)
    folded = fit_grids(weights, hessians, **FORM, with_zeta=True, max_rounds=30)
    assert loss(weights, hessians, folded) < 0.7 * loss(weights, hessians, plain)


def test_more_rounds_never_end_above_fewer() -> None:
    weights, hessians = problem()
    losses = [
        loss(weights, hessians, fit_grids(weights, hessians, **FORM, with_zeta=True, max_rounds=n))
        for n in (1, 2, 5, 30)
    ]
    assert losses == sorted(losses, reverse=True)
