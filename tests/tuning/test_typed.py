"""Block types are learned: the start is the stored weight, and every forward pass has what is stored."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from aespa_pl.algorithm.grid import search_grid
from aespa_pl.algorithm.grid_types import TYPES, TypedWeight
from aespa_pl.algorithm.quantizer import GridFormat, quantize
from aespa_pl.tuning.typed import TypedStraightThrough

ROWS, COLUMNS = 4, 256


def stored(name: str) -> tuple[Tensor, TypedWeight]:
    """Return a weight, and what the type stores of it."""
    torch.manual_seed(0)
    W = torch.randn(1, ROWS, COLUMNS)
    form = GridFormat.of(TYPES[name])
    grid = search_grid(W, torch.eye(COLUMNS)[None], torch.ones(COLUMNS), form)[0]
    grid = grid.folded(torch.ones(1, ROWS))
    assert grid.factors is not None
    return W[0], grid.factors.stored(quantize(W, grid)[0].to(torch.uint8))


def layer_of(made: nn.Module) -> Any:
    layer = nn.Linear(COLUMNS, ROWS, bias=False)
    parametrize.register_parametrization(layer, "weight", made)
    return layer


@pytest.mark.parametrize("name", TYPES)
def test_training_starts_at_the_stored_weight(name: str) -> None:
    W, start = stored(name)
    made = TypedStraightThrough(start, W)
    layer = layer_of(made)
    torch.testing.assert_close(layer.weight, start.weight(), rtol=1e-6, atol=1e-6)
    found = made.quantized(layer.parametrizations.weight.original.detach())
    assert torch.equal(found.weight(), start.weight())


@pytest.mark.parametrize("name", TYPES)
def test_a_step_lowers_the_error_and_what_is_stored_is_the_weight(name: str) -> None:
    W, start = stored(name)
    made = TypedStraightThrough(start, W)
    layer = layer_of(made)
    target = start.weight() * 1.1  # each scale should grow
    optimizer = torch.optim.Adam(layer.parameters(), 0.003)
    errors = []
    for _ in range(30):
        error = (layer.weight - target).square().sum()
        errors.append(float(error.detach()))
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    assert min(errors) < errors[0]
    found = made.quantized(layer.parametrizations.weight.original.detach())
    torch.testing.assert_close(found.weight(), layer.weight.detach(), rtol=1e-6, atol=1e-6)
    assert int(found.integers.max()) <= TYPES[name].largest
    if found.sub_scale is not None:
        low, high = TYPES[name].scales
        assert low <= int(found.sub_scale.min())
        assert int(found.sub_scale.max()) <= high
        assert not bool((found.sub_scale == 0).any())


@pytest.mark.parametrize("name", TYPES)
def test_integers_that_move_on_disk_are_those_of_the_latent_values(name: str) -> None:
    W, start = stored(name)
    made = TypedStraightThrough(start, W)
    steps = torch.randn(ROWS, COLUMNS)
    latent = start.integers / TYPES[name].distance
    assert torch.equal(made.nearest(latent), latent)
    moved = start.moved(steps)
    assert torch.equal(moved.integers, made.quantized(latent + steps).integers)
    assert 0.2 < float((moved.integers != start.integers).float().mean()) < 0.9


def test_all_that_a_type_stores_beside_the_integers_is_learned() -> None:
    _, start = stored("Q3_K")
    made = TypedStraightThrough(start, start.weight())
    assert {name for name, _ in made.named_parameters()} == {"log_d", "a"}


@pytest.mark.parametrize("name", ["Q2_K", "Q4_0"])
def test_soft_integers_stand_on_the_same_grid(name: str) -> None:
    W, start = stored(name)
    made = TypedStraightThrough(start, W)
    made.sharpness = 4.0
    latent = start.integers.float()
    latent[:, ::2] = (
        6.5 if name == "Q4_0" else 0.5
    )  # halfway, so the mean is the middle of neighbours, nearly
    latent.requires_grad_()
    scale, minimum = (x.repeat_interleave(made.kind.group, 1) for x in start.grid())
    halfway = latent.detach()[:, ::2] * scale[:, ::2] - minimum[:, ::2]
    soft = made(latent).detach()
    torch.testing.assert_close(soft[:, ::2], halfway, rtol=0, atol=0.02)
    with torch.no_grad():
        hard = made(latent)
    assert torch.equal(hard[:, 1::2], start.weight()[:, 1::2])
    assert bool(((hard - soft).abs() > 0.1 * scale)[:, ::2].all())


@pytest.mark.parametrize("name", [name for name, kind in TYPES.items() if kind.scales != (1, 1)])
def test_scale_that_would_fall_to_0_is_stored_as_1(name: str) -> None:
    """One that is 0 would never change again, and the end-to-end tuning would divide by it."""
    W, start = stored(name)
    made = TypedStraightThrough(start, W)
    a = made.get_parameter("a")
    with torch.no_grad():
        a.copy_(-0.5 / start.kind.scales[1] * torch.rand_like(a))
    found = made.quantized(start.integers.float())
    assert found.sub_scale is not None
    assert torch.equal(found.sub_scale, torch.ones_like(found.sub_scale))
