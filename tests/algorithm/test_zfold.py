from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from aespa_pl.algorithm import zeta as alternation
from aespa_pl.algorithm.candidates import EXHAUSTIVE, Effort
from aespa_pl.algorithm.grid import min_max_grid, search_grid
from aespa_pl.algorithm.quantizer import Grid, GridFormat, dequantize, quantize
from aespa_pl.algorithm.zeta import fit_grids, least_squares_zeta
from tests import reference

FORM = GridFormat(2)


def problem() -> tuple[list[Tensor], list[Tensor]]:
    """Two projections of one input whose columns have very different sizes."""
    sizes = torch.logspace(-1, 1, 12, dtype=torch.float64)
    weights = [torch.randn(1, 20, 12, dtype=torch.float64) * sizes for _ in range(2)]
    X = torch.randn(12, 80, dtype=torch.float64)
    return weights, [(X @ X.T)[None]] * 2


def loss(weights: list[Tensor], hessians: list[Tensor], grids: list[Grid]) -> float:
    total = 0.0
    for W, H, g in zip(weights, hessians, grids, strict=True):
        error = (dequantize(quantize(W, g), g) - W)[0]
        total += float(torch.trace(error @ H[0] @ error.T))
    return total


Searched = tuple[Tensor, Tensor, Grid]


def fit(
    weights: list[Tensor],
    hessians: list[Tensor],
    *,
    with_zeta: bool = True,
    max_rounds: int = 30,
    form: GridFormat | Sequence[GridFormat] = FORM,
    exhaustive: bool = False,
    searched: list[Searched] | None = None,
    efforts: list[Effort] | None = None,
) -> list[Grid]:
    """Return the grids of all projections.

    ``searched`` gets weight, Hessian and grid of each search, and ``efforts`` its effort.
    """
    seen = searched if searched is not None else []

    def search_one(
        pair: tuple[Tensor, Tensor], zeta: Tensor, grid_format: GridFormat, effort: Effort
    ) -> tuple[Grid, float]:
        grid, loss = search_grid(*pair, zeta, grid_format, effort=effort)
        seen.append((*pair, grid))
        if efforts is not None:
            efforts.append(effort)
        return grid, float(loss)

    return fit_grids(
        weights,
        list(zip(weights, hessians, strict=True)),
        [form] * len(weights) if isinstance(form, GridFormat) else form,
        with_zeta=with_zeta,
        max_rounds=max_rounds,
        search_one=search_one,
        exhaustive=exhaustive,
    )


def test_loss_of_a_search_is_that_of_nearest_rounding_on_its_grid() -> None:
    weights, hessians = problem()
    zeta = torch.rand(12, dtype=torch.float64) + 0.5
    for W, H in zip(weights, hessians, strict=True):
        grid, loss = search_grid(W, H, zeta, FORM)
        expected = 0.0
        for row, (s,), (z,) in zip(W[0], grid.scale[0], grid.zero_point[0], strict=True):
            step = s * zeta
            error = step * (reference.nearest(row / zeta, float(s), float(z), 3) - z) - row
            expected += float(error @ H[0] @ error)
        assert loss == pytest.approx(expected)


def test_zeta_is_the_least_squares_factor_of_each_column() -> None:
    weights, _ = problem()
    zeta = torch.rand(12, dtype=torch.float64) + 0.5
    grids = [min_max_grid(W, zeta, FORM) for W in weights]
    fitted = least_squares_zeta(weights, grids)
    for j in range(12):
        w = torch.cat([W[0, :, j] for W in weights])
        value = torch.cat(
            [(dequantize(quantize(W, g), g) / zeta)[0, :, j] for W, g in zip(weights, grids, strict=True)]
        )
        # Least squares by the library; a column that is quantized to 0 everywhere keeps its factor.
        expected = torch.linalg.lstsq(value[:, None], w[:, None]).solution.item() or float(zeta[j])
        torch.testing.assert_close(float(fitted[j]), expected)


def test_zeta_stays_positive_and_finite_for_a_dead_column() -> None:
    weights, hessians = problem()
    for W in weights:
        W[..., 3] = 0
    for g in fit(weights, hessians):
        assert bool((g.zeta > 0).all())
        assert bool(g.zeta.isfinite().all())


def test_projections_of_one_input_share_zeta() -> None:
    weights, hessians = problem()
    first, second = fit(weights, hessians)
    assert torch.equal(first.zeta, second.zeta)


def test_without_zeta_it_is_one() -> None:
    weights, hessians = problem()
    for g in fit(weights, hessians, with_zeta=False):
        assert bool((g.zeta == 1).all())


def test_zeta_lowers_the_loss_of_unequal_columns() -> None:
    weights, hessians = problem()
    plain = fit(weights, hessians, with_zeta=False)
    folded = fit(weights, hessians)
    assert loss(weights, hessians, folded) < 0.7 * loss(weights, hessians, plain)


def test_more_rounds_never_end_above_fewer() -> None:
    weights, hessians = problem()
    losses = [loss(weights, hessians, fit(weights, hessians, max_rounds=n)) for n in (1, 2, 5, 30)]
    assert losses == sorted(losses, reverse=True)


def test_first_zeta_is_that_of_the_min_max_grid() -> None:
    weights, hessians = problem()
    found = fit(weights, hessians, max_rounds=1)
    rounded = []
    for w in torch.cat(weights, 1)[0]:
        low, high = min(float(w.min()), 0), max(float(w.max()), 0)
        scale = (high - low) / 3
        zero = round(-low / scale)
        rounded.append(scale * (reference.nearest(w, scale, zero, 3) - zero))
    value, W = torch.stack(rounded), torch.cat(weights, 1)[0]
    for j in range(12):
        fitted = torch.linalg.lstsq(value[:, j, None], W[:, j, None]).solution.item()
        torch.testing.assert_close(float(found[0].zeta[j]), fitted or 1.0)


def test_long_steps_of_zeta_find_lower_losses_in_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4 bits, over several problems; a leap of 1 is the plain alternation."""
    losses, rounds = {1.0: 0.0, alternation.LEAP: 0.0}, {1.0: 0, alternation.LEAP: 0}
    for seed in range(8):
        torch.manual_seed(seed)
        weights, hessians = problem()
        for leap in losses:
            monkeypatch.setattr(alternation, "LEAP", leap)
            searched: list[Searched] = []
            found = fit(weights, hessians, form=GridFormat(4), searched=searched)
            losses[leap] += loss(weights, hessians, found)
            rounds[leap] += len(searched)
    plain, leaping = losses
    assert losses[leaping] < losses[plain]
    assert rounds[leaping] < rounds[plain]


@pytest.mark.parametrize("max_rounds", [1, 2, 30])
def test_alternation_ends_when_the_loss_no_longer_falls_and_keeps_the_best(max_rounds: int) -> None:
    """Over several problems; each round's loss is measured here, on the grids that it searched."""
    searched: list[Searched] = []
    best_rounds = set()
    for seed in range(8):
        torch.manual_seed(seed)
        weights, _ = problem()
        if seed % 2:  # columns of one size: zeta may not help at all
            weights = [torch.randn_like(W) for W in weights]
        X = torch.randn(2, 12, 80, dtype=torch.float64) * torch.logspace(0, 1, 12)[:, None]
        hessians = list((X @ X.transpose(1, 2))[:, None])
        searched.clear()
        found = fit(weights, hessians, max_rounds=max_rounds, searched=searched)
        rounds = [searched[i : i + 2] for i in range(0, len(searched), 2)]
        losses = []
        for pair in rounds:
            for (W, H, _), weight, hessian in zip(pair, weights, hessians, strict=True):
                assert W is weight
                assert H is hessian
            losses.append(loss(weights, hessians, [grid for _, _, grid in pair]))
        # the first search is without zeta, the last with the best one; the alternation is between
        gains = [1 - after / before for before, after in pairwise(losses[1:-1])]
        assert all(gain > 1e-3 for gain in gains[:-1])
        assert len(rounds) == max_rounds + 2 or gains[-1] <= 1e-3
        zetas = [pair[0][2].zeta for pair in rounds]
        best = losses.index(min(losses[:-1]))
        assert torch.equal(zetas[-1], zetas[best])
        best_rounds.add(best)
        for grid, (_, _, chosen) in zip(found, rounds[-1], strict=True):
            assert grid is chosen
    # the problems are such that the best round is not always the same
    assert max_rounds < 30 or len(best_rounds) > 1


def test_an_exhaustive_search_tries_all_and_goes_on_while_the_loss_falls() -> None:
    weights, hessians = problem()
    efforts: list[Effort] = []
    searched: list[Searched] = []
    grids = fit(weights, hessians, exhaustive=True, efforts=efforts, searched=searched)
    assert set(efforts) == {EXHAUSTIVE}
    rounds = [
        loss(weights, hessians, [a[2], b[2]]) for a, b in zip(searched[::2], searched[1::2], strict=True)
    ][1:-1]  # without the one of no zeta, and the last
    assert all(later < earlier for earlier, later in pairwise(rounds[:-1]))
    assert rounds[-1] >= rounds[-2]
    assert loss(weights, hessians, grids) == pytest.approx(min(rounds))
