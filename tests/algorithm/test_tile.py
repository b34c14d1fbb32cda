"""A CPU visits a tile weight after weight; an accelerator makes the beginning of that visit or all of it."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from aespa_pl.algorithm import tile as tiles
from aespa_pl.algorithm.tile import Tile, find_coupled_moves, find_moves

UNITS, ROWS, COLUMNS = 5, 4, 8
MANY = ROWS * COLUMNS + 2
both_kinds = pytest.mark.parametrize("coupled", [False, True])


@dataclass(frozen=True)
class Given:
    """Holds a tile whose moves depend on each other, and what they depend on."""

    tile: Tile
    H: Tensor
    G: Tensor
    scale: Tensor
    """Of each row, ``[units, rows]``."""
    zeta: Tensor
    """Of each column."""

    def effects(self) -> Tensor:
        """Return what a move by 1 in a column adds to what the columns want."""
        return -self.zeta[:, None] * self.H / (self.zeta * self.H.diagonal())

    def both(self) -> Tensor:
        return torch.cat([self.effects(), self.effects().triu(1)], -1)

    def below(self) -> Tensor:
        """Return how much of that a move in a row adds to the rows below."""
        own = self.G.diagonal(dim1=1, dim2=2)[..., None]
        return (self.G * self.scale[:, None] / (own * self.scale[..., None])).tril(-1)

    def sequential(self) -> Tensor:
        """Return the moves of a loop over rows and columns, each with the effects of all before it."""
        moves = torch.zeros_like(self.tile.wanted)
        for unit in range(UNITS):
            G, step = self.G[unit], self.scale[unit, :, None] * self.zeta
            for i in range(ROWS):
                for j in range(COLUMNS):
                    # half of the gradient that the moves so far have added, and a Newton step
                    gradient = G[i] @ (moves[unit] * step) @ self.H[:, j]
                    newton = -gradient / (G[i, i] * self.H[j, j] * step[i, j])
                    best = torch.round(self.tile.wanted[unit, i, j] + newton)
                    moves[unit, i, j] = best.clamp(self.tile.down[unit, i, j], self.tile.up[unit, i, j])
        return moves


def given(*, coupled: bool) -> Given:
    X, K = torch.randn(COLUMNS, 10), torch.randn(UNITS, 6, ROWS)
    H, G = (X @ X.T).double(), (K.mT @ K).double()
    if not coupled:
        G = torch.eye(ROWS).double().expand(UNITS, ROWS, ROWS)
    scale, zeta = (torch.rand(*size).double() + 0.5 for size in ((UNITS, ROWS), (COLUMNS,)))
    step = scale[..., None] * zeta
    dW = 2 * step * torch.randn(UNITS, ROWS, COLUMNS)
    curvature = G.diagonal(dim1=1, dim2=2)[..., None] * H.diagonal()
    down = -torch.randint(0, 4, dW.shape).double()
    wanted = -(G @ dW @ H) / (step * curvature)
    return Given(Tile(wanted, down, down + 3), H, G, scale, zeta)


def on_an_accelerator(given: Given, *, coupled: bool) -> Tensor:
    """Return what an accelerator finds in a visit."""
    if not coupled:
        return find_moves(given.tile, given.effects().triu(1)[None], asks=False)
    return find_coupled_moves(given.tile, given.both(), given.below(), asks=False)


def on_a_cpu(given: Given, *, coupled: bool) -> Tensor:
    """Return what a CPU finds in a visit."""
    tile = given.tile
    if coupled:
        return find_coupled_moves(tile, given.both(), given.below(), asks=True)
    wanted, down, up = (x.flatten(0, 1)[:, None] for x in (tile.wanted, tile.down, tile.up))
    rows = Tile(wanted, down, up)
    return find_moves(rows, given.effects().triu(1)[None], asks=True).view_as(tile.wanted)


@both_kinds
def test_many_rounds_are_a_sequential_visit(coupled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "COUPLED_ROUNDS" if coupled else "ROUNDS", MANY)
    problem = given(coupled=coupled)
    assert torch.equal(on_an_accelerator(problem, coupled=coupled), problem.sequential())


@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.parametrize(
    ("device", "coupled"), [("accelerator", False), ("accelerator", True), ("cpu", True)]
)
def test_few_rounds_are_its_beginning(
    device: str, coupled: bool, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ROUNDS", "COUPLED_ROUNDS", "CPU_COUPLED_ROUNDS"):
        monkeypatch.setattr(tiles, name, rounds)
    problem = given(coupled=coupled)
    visit = on_a_cpu if device == "cpu" else on_an_accelerator
    found, expected = visit(problem, coupled=coupled), problem.sequential()
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
def test_a_cpu_finds_the_moves_of_a_sequential_visit(coupled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that have settled are left out of the rounds that follow."""
    monkeypatch.setattr(tiles, "CPU_COUPLED_ROUNDS", MANY)
    left: list[int] = []
    some = Tile.some

    def noted(self: Tile, chosen: Tensor) -> Tile:
        left.append(len(chosen))
        return some(self, chosen)

    monkeypatch.setattr(Tile, "some", noted)
    problem = given(coupled=coupled)
    assert torch.equal(on_a_cpu(problem, coupled=coupled), problem.sequential())
    assert bool(left) is not coupled
