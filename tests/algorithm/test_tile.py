"""A CPU visits a tile weight after weight; an accelerator makes the beginning of that visit or all of it."""

import pytest
import torch
from torch import Tensor

from aespa_pl.algorithm import tile as tiles
from aespa_pl.algorithm.replay import Replayed
from aespa_pl.algorithm.tile import (
    Tile,
    find_coupled_moves,
    find_moves,
    settled_coupled_moves,
    settled_moves,
)

UNITS, ROWS, COLUMNS = 5, 4, 8
MANY = ROWS * COLUMNS + 2
both_kinds = pytest.mark.parametrize("coupled", [False, True])


def given(*, coupled: bool) -> tuple[Tile, Tensor, Tensor]:
    """Return a tile whose moves depend on each other, H and G of its columns and rows."""
    X, K = torch.randn(COLUMNS, 10), torch.randn(UNITS, 6, ROWS)
    H, G = (X @ X.T).double(), (K.mT @ K).double()
    if not coupled:
        G = torch.eye(ROWS).double().expand(UNITS, ROWS, ROWS)
    step = (torch.rand(UNITS, ROWS, 1) + 0.5).double().expand(UNITS, ROWS, COLUMNS)
    dW = 2 * step * torch.randn(UNITS, ROWS, COLUMNS)
    curvature = G.diagonal(dim1=1, dim2=2)[..., None] * H.diagonal()
    down = -torch.randint(0, 4, dW.shape).double()
    return Tile(G @ dW @ H, step, -1 / (step * curvature), down, down + 3), H, G


def sequential(tile: Tile, H: Tensor, G: Tensor) -> Tensor:
    """Return the moves of a loop over rows and columns, each with the effects of all before it."""
    moves = torch.zeros_like(tile.P)
    for unit in range(UNITS):
        for i in range(ROWS):
            for j in range(COLUMNS):
                delta = moves[unit] * tile.step[unit]
                gradient = tile.P[unit, i, j] + G[unit, i] @ delta @ H[:, j]
                best = torch.round(gradient * tile.newton[unit, i, j])
                moves[unit, i, j] = best.clamp(tile.down[unit, i, j], tile.up[unit, i, j])
    return moves


def visited(tile: Tile, H: Tensor, G: Tensor, *, coupled: bool) -> Tensor:
    if not coupled:
        return settled_moves(H.triu(1)[None], *tile.tensors())[0]
    both, own = torch.cat([H, H.triu(1)], -1), G.diagonal(dim1=1, dim2=2)[..., None]
    return settled_coupled_moves(both, own, G.tril(-1), *tile.tensors())[0]


@both_kinds
def test_many_rounds_are_a_sequential_visit(coupled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "COUPLED_ROUNDS" if coupled else "ROUNDS", MANY)
    tile, H, G = given(coupled=coupled)
    assert torch.equal(visited(tile, H, G, coupled=coupled), sequential(tile, H, G))


@both_kinds
@pytest.mark.parametrize("rounds", [2, 3])
def test_few_rounds_are_its_beginning(
    rounds: int, coupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "COUPLED_ROUNDS" if coupled else "ROUNDS", rounds)
    tile, H, G = given(coupled=coupled)
    found, expected = visited(tile, H, G, coupled=coupled), sequential(tile, H, G)
    # a visit that depends on nothing else: a head where G couples its rows, else a row
    end = -2 if coupled else -1
    cut = 0
    found, expected = (x.flatten(end, -1).flatten(0, -2) for x in (found, expected))
    for mine, whole in zip(found, expected, strict=True):
        kept = int(mine.nonzero().amax()) + 1 if mine.any() else 0
        assert torch.equal(mine[:kept], whole[:kept])
        if whole[:rounds].any():  # each round settles one more at least
            assert kept >= int(whole[:rounds].nonzero().amax()) + 1
        cut += bool(whole[kept:].any())
    assert cut  # rounds were too few for some


@both_kinds
@pytest.mark.parametrize("looks", [(), (1, 2, 4), tuple(range(1, MANY))])
def test_a_cpu_finds_the_moves_of_a_sequential_visit(
    looks: tuple[int, ...], coupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units that have settled are left out of the rounds that follow."""
    monkeypatch.setattr(tiles, "LOOKS", looks)
    left: list[int] = []
    some = Tile.some

    def noted(self: Tile, chosen: Tensor) -> Tile:
        left.append(len(chosen))
        return some(self, chosen)

    monkeypatch.setattr(Tile, "some", noted)
    tile, H, G = given(coupled=coupled)
    rounds = Replayed(settled_moves, "a test")
    if coupled:
        both, own = torch.cat([H, H.triu(1)], -1), G.diagonal(dim1=1, dim2=2)[..., None]
        found = find_coupled_moves(tile, both, own, G.tril(-1), rounds)
    else:
        rows = Tile(*(x.flatten(0, 1)[:, None] for x in tile.tensors()))
        found = find_moves(rows, H.triu(1)[None], rounds).view_as(tile.P)
    assert torch.equal(found, sequential(tile, H, G))
    assert bool(left) == (not coupled or bool(looks))
