"""Find the moves of coordinate descent in a tile: some rows and columns of each unit, visited in turn.

A move depends on those before it. All moves are found at once, again and again, with the effects of the
moves that were found before: so the first is right at once, the second when the first is, and so on. As
few moves matter to others, most are settled after a few rounds.

A visit that *asks*, on a CPU, ends when all moves are settled; on an accelerator it has all its rounds,
because the host would have to wait for the answer. With G, and on an accelerator, the rounds are limited, and
moves behind the first that is not settled are left to the next visit: they are 0.

Everything in a tile is counted in integers, that is in steps of the grid. So its columns belong to one group.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from aespa_pl.algorithm.grid_types import nearest

ROUNDS, COUPLED_ROUNDS = 4, 8
"""Rounds of a visit that doesn't ask, without G and with it; two at least, to tell what is settled."""
LARGE_HEAD = 256
"""Rows of a head with G above which it is large: there each row depends little on a few others."""
CPU_COUPLED_ROUNDS = 16
"""Rounds of a visit with G that asks, at most. A few heads that couple their rows strongly would take 100."""


@dataclass(frozen=True)
class Tile:
    """Holds the moves that some rows and columns of each unit would make, and how far they can go."""

    wanted: Float[Tensor, "units rows columns"]
    """The best move of each weight while all others stay, before it is rounded."""
    down: Float[Tensor, "units rows columns"]
    up: Float[Tensor, "units rows columns"]
    """The least and the largest moves that stay in the range."""
    levels: tuple[int, ...] | None = None
    """The integers of the grid, where they are not all."""

    def some(self, chosen: Int[Tensor, " some"]) -> "Tile":
        """Return the tile of some units."""
        wanted, down, up = (x.index_select(0, chosen) for x in (self.wanted, self.down, self.up))
        return Tile(wanted, down, up, self.levels)

    def possible(self, wanted: Float[Tensor, "units rows columns"]) -> Tensor:
        """Return the moves nearest to what is wanted that end at an integer of the grid, in its memory."""
        if self.levels is not None:
            return nearest(wanted.sub_(self.down), self.levels).add_(self.down)
        moves = wanted.round_()
        # a clamp with tensors would take four times as long
        return torch.minimum(torch.maximum(moves, self.down, out=moves), self.up, out=moves)


def find_moves(
    tile: Tile, later: Float[Tensor, "#units columns columns"], *, asks: bool
) -> Float[Tensor, "units rows columns"]:
    """Return the moves of a visit of weight after weight, where rows don't depend on each other.

    A move by 1 adds ``later`` to the wanted moves of the columns to come; it is 0 on the diagonal and below.
    """
    latest = moves = before = tile.possible(tile.wanted.clone())
    if not asks:
        for _ in range(ROUNDS - 1):
            before, moves = moves, tile.possible(add_times(tile.wanted.clone(), moves, later))
        return _settled(moves, before)
    among = unsettled = moving(moves)
    for _ in range(tile.wanted[0].numel()):  # NaN would go on for ever
        if not unsettled.numel():
            break
        if len(later) == 1 and 2 * len(unsettled) <= len(moves):
            among = unsettled if moves is latest else among[unsettled]
            tile, moves = tile.some(unsettled), moves.index_select(0, unsettled)
        before, moves = moves, tile.possible(add_times(tile.wanted.clone(), moves, later))
        if len(moves) == len(latest):
            latest = moves
        else:
            latest.index_copy_(0, among, moves)
        unsettled = moving(moves - before)
    return latest


def find_coupled_moves(
    tile: Tile, both: Float[Tensor, "columns twice"], below: Float[Tensor, "units rows rows"], *, asks: bool
) -> Float[Tensor, "units rows columns"]:
    """Return the moves of a visit of weight after weight, where G couples the rows.

    A move by 1 adds the first half of ``both`` to the wanted moves of all these columns; the second half is
    the part above the diagonal, ``later`` of ``find_moves``. A row adds ``below`` of that to each row to
    come.
    """
    columns = tile.wanted.shape[-1]
    product = tile.wanted.new_empty(*tile.wanted.shape[:2], 2 * columns)
    flat, (of_rows_above, of_this_row) = product.view(-1, 2 * columns), product.chunk(2, -1)
    # one tensor for both would take 5 % longer: their addresses may differ by whole pages
    memory = [tile.wanted.new_empty(tile.wanted.shape) for _ in range(2)]
    moves = before = tile.possible(tile.wanted.clone())
    for number in range((CPU_COUPLED_ROUNDS if asks else COUPLED_ROUNDS) - 1):
        torch.mm(moves.view(-1, columns), both, out=flat)
        wanted = torch.baddbmm(tile.wanted, below, of_rows_above, out=memory[number % 2])
        before, moves = moves, tile.possible(wanted.add_(of_this_row))
        if asks and torch.equal(moves, before):
            return moves
    return _settled(moves.flatten(1), before.flatten(1)).view_as(moves)


def moving(moves: Float[Tensor, "units rows columns"]) -> Int[Tensor, " some"]:
    """Return the units with a move that is not 0."""
    # a sixth of the time of any() on numbers
    lengths: Tensor = torch.linalg.vector_norm(moves.flatten(1), dim=-1)
    return lengths.nonzero()[:, 0]


def _settled(moves: Tensor, before: Tensor) -> Tensor:
    """Return the moves up to the first that the last round changed, which is right itself; then 0."""
    changed = (moves != before).to(torch.uint8)
    return moves * (changed.cumsum(-1) <= changed)


def times(
    delta: Float[Tensor, "units rows columns"], H: Float[Tensor, "#units columns some"]
) -> Float[Tensor, "units rows some"]:
    """Return ``delta H``, as one large product where all units share H."""
    return delta @ (H[0] if len(H) == 1 else H)


def add_times(
    total: Float[Tensor, "units rows some"],
    delta: Float[Tensor, "units rows columns"],
    H: Float[Tensor, "#units columns some"],
) -> Float[Tensor, "units rows some"]:
    """Add ``delta H`` to a sum, in place, without memory for the product."""
    if len(H) == 1:
        total.view(-1, total.shape[-1]).addmm_(delta.flatten(0, 1), H[0])
        return total
    return total.baddbmm_(delta, H)
