"""Integers that move on disk: a step is the formula, and its files are those that are needed."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from aespa_pl.distributed.processes import ALONE, World
from aespa_pl.tuning.moving import Moves, latents
from aespa_pl.tuning.parametrization import StraightThrough
from tests.disks import truncate
from tests.run.bench import remove
from tests.tuning.tuned import quantize


def make_block() -> nn.Module:
    torch.manual_seed(0)
    first, second = nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False)
    for layer, bits in ((first, 2), (second, 3)):
        start = quantize(layer.weight.detach(), bits)
        parametrize.register_parametrization(layer, "weight", StraightThrough(start, start.weight()))
    return nn.Sequential(first, nn.ReLU(), second)


def test_a_step_is_the_formula_with_the_rate_of_the_bits(tmp_path: Path) -> None:
    moves = Moves(tmp_path, {2: 0.25, 3: 0.125}.__getitem__)
    integers = [made.original.detach().round() for made in latents(make_block()).values()]
    expected = [value.clone() for value in integers]
    for share in (1.0, 0.5):
        moves.share, block = share, make_block()  # read again
        offsets = moves.read(7)
        moves.apply(block, offsets)
        gradients = [1e-6 * torch.randn_like(value) for value in integers]
        gradients[0][1] = 0
        gradients[1][2, 3] = 1.0  # others are small beside it
        moves.take_step(7, block, offsets, [g.clone() for g in gradients])
        moves.step += 1
        for value, g, rate in zip(expected, gradients, (0.25, 0.125), strict=True):
            squares = g.double().square()
            for i, j in itertools.product(*map(range, g.shape)):
                size = math.sqrt(squares[i].sum() * squares[:, j].sum() / squares.sum())
                value[i, j] -= share * rate * max(-3.0, min(3.0, float(g[i, j]) / (size or 1.0)))
    block = make_block()
    moves.apply(block, moves.read(7))
    for made, value in zip(latents(block).values(), expected, strict=True):
        assert torch.allclose(made.original.detach(), value, atol=1e-3)  # offsets in float16


class Two(World):
    """Adds to a gradient what another process has, which is its first row."""

    def sum_(self, tensor: Tensor) -> None:
        tensor[0] += 3.0


def test_a_step_of_several_processes_follows_the_sum_of_their_gradients(tmp_path: Path) -> None:
    found = []
    for world, rest in ((Two(), 0.0), (ALONE, 3.0)):
        moves, block = Moves(tmp_path, lambda _: 0.1, world), make_block()
        torch.manual_seed(1)
        gradients = [torch.randn_like(made.original) for made in latents(block).values()]
        for gradient in gradients:
            gradient[0] += rest
        moves.share = 1.0
        moves.take_step(0, block, {}, gradients)
        moves.step += 1
        found.append(moves.read(0))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


@pytest.mark.parametrize("kept", [{0}, {1, 3}])
def test_files_of_other_steps_are_removed(kept: set[int], tmp_path: Path) -> None:
    moves, block = Moves(tmp_path, lambda _: 0.1), make_block()
    for moves.step in range(3):
        gradients = [torch.ones_like(made.original) for made in latents(block).values()]
        moves.take_step(0, block, moves.read(0), gradients)
    moves.keep(kept)
    assert {path.name for path in tmp_path.iterdir()} == {f"step_{step}" for step in kept - {0}}


@pytest.mark.parametrize("damage", [truncate, remove])
def test_a_damaged_file_of_any_block_and_step_is_noticed(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    moves, block = Moves(tmp_path, lambda _: 0.1), make_block()
    assert moves.has({0}, 2)
    assert not moves.has({0, 1}, 2)
    for moves.step in range(2):
        gradients = [torch.ones_like(made.original) for made in latents(block).values()]
        for index in range(2):
            moves.take_step(index, block, moves.read(index), gradients)
    assert moves.has({0, 1, 2}, 2)
    damage(tmp_path / "step_1/block_001.safetensors")
    assert moves.has({0, 2}, 2)
    assert not moves.has({1, 2}, 2)
