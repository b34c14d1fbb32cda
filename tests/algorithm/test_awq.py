"""AWQ's column factors are the paper's, and the one that is kept has the least output error of all."""

from pathlib import Path

import torch
from torch import Tensor, nn

from aespa_pl.algorithm.quantizer import GridFormat
from aespa_pl.algorithm.zeta import candidate_zetas, nearest_loss
from aespa_pl.models.weights import projection_weight
from tests.walks import walk


def awq_factor(magnitude: Tensor, number: int) -> Tensor:
    """Return what the paper multiplies the columns of weights by, in float64."""
    # an input that is always 0 counts as a small one
    factor = magnitude.double().clamp(min=1e-4 * float(magnitude.max())) ** (number / 20)
    return factor / (factor.max() * factor.min()).sqrt()


def awq_loss(W: Tensor, X: Tensor, factor: Tensor, bits: int, damping: float = 0.0) -> float:
    """Return ``2 E||(Q(W diag(s)) diag(1/s) - W) x||^2`` row by row in float64; Q rounds to nearest."""
    largest, total = 2**bits - 1, 0.0
    for row in W.double():
        scaled = (row * factor).tolist()
        low, high = min(0.0, *scaled), max(0.0, *scaled)
        step = (high - low) / largest
        zero = round(-low / step)
        rounded = [min(max(round(w / step) + zero, 0), largest) - zero for w in scaled]
        error = step * torch.tensor(rounded, dtype=torch.float64) / factor - row
        total += 2 * float((X.double() @ error).square().mean())
        total += damping * float(error.square().sum())
    return total


def test_zeta_is_the_inverse_of_awqs_factor_and_its_loss_that_of_the_scaled_weights() -> None:
    torch.manual_seed(0)
    W, X = torch.randn(6, 8), torch.randn(40, 8) * torch.logspace(-1, 1, 8)
    H = 2 * X.T @ X / len(X)
    zetas = candidate_zetas(X.abs().mean(0))
    assert zetas.shape == (20, 8)
    losses = []
    for number, zeta in enumerate(zetas):
        factor = awq_factor(X.abs().mean(0), number)
        torch.testing.assert_close(1 / zeta.double(), factor, rtol=1e-5, atol=0)
        expected = awq_loss(W, X, factor, bits=3)
        losses.append(nearest_loss(W[None], H[None], zeta, GridFormat(3)))
        assert abs(losses[-1] - expected) < 1e-4 * expected
    assert min(losses) < 0.9 * losses[0]  # a factor does help here


def test_dead_inputs_have_a_finite_factor() -> None:
    zetas = candidate_zetas(torch.tensor([0.0, 1.0, 2.0]))
    assert bool(zetas.isfinite().all())
    assert bool((zetas > 0).all())
    assert torch.equal(candidate_zetas(torch.zeros(3)), torch.ones(20, 3))


def test_a_walk_keeps_the_power_with_the_least_output_error_of_each_group(tmp_path: Path) -> None:
    """The inputs are those that the library's own modules see, so the statistic is right as well."""
    found = walk("opt", tmp_path, {"method": "awq", "bits": 3, "rounding.keep_best": None})
    block = found.original.get_submodule(found.blocks_path)[0]
    seen: dict[str, Tensor] = {}

    def keep(path: str) -> None:
        def hook(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            seen[path] = arguments[0].flatten(0, -2).double()

        block.get_submodule(path).register_forward_pre_hook(hook)

    for group in found.layout.groups:
        keep(group.projections[0].module)
    with torch.no_grad():
        found.original(found.ids)
    powers = []
    for group in found.layout.groups:
        X = seen[group.projections[0].module]
        factors = [awq_factor(X.abs().mean(0), number) for number in range(20)]
        damping = 0.01 * 2 * float(X.square().mean())
        alive = X.square().sum(0) > 0
        weights = [projection_weight(block, found.layout, p) * alive for p in group.projections]
        losses = [sum(awq_loss(W, X, f, 3, damping) for W in weights) for f in factors]
        powers.append(losses.index(min(losses)))
        zeta = found.file(0)[f"{group.name}.zeta"].double()
        torch.testing.assert_close(1 / zeta, factors[powers[-1]], rtol=1e-4, atol=0)
    assert any(powers)
