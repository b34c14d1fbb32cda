"""Find the moves of coordinate descent in a tile: some rows and columns of each unit, visited in turn.

A move depends on those before it. All moves are found at once, again and again, with the effects of the
moves that were found before: so the first is right at once, the second when the first is, and so on. As
few moves matter to others, most are settled after a few rounds.

On a CPU a visit without G goes on until all moves are settled. With G, and on an accelerator, the rounds are
limited, and moves behind the first that is not settled are left to the next visit. On an accelerator a visit
always has all its rounds, because the host would have to wait for the answer whether moves are settled.

Everything in a tile is counted in integers, that is in steps of the grid. So its columns belong to one group.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

ROUNDS, COUPLED_ROUNDS = 4, 8
"""Rounds of a visit on an accelerator, without G and with it; two at least, to tell what is settled."""
CPU_COUPLED_ROUNDS = 16
"""Rounds of a visit on a CPU with G, at most. A few heads that couple their rows strongly would take 100."""


@dataclass
class Tile:
    """Holds the moves that some rows and columns of each unit would make, and how far they can go."""

    wanted: Float[Tensor, "units rows columns"]
    """The best move of each weight while all others stay, before it is rounded."""
    down: Float[Tensor, "units rows columns"]
    """The least moves that stay in the range."""
    up: Float[Tensor, "units rows columns"]
    """The largest moves that stay in the range."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all fields, in the order of the constructor."""
        return self.wanted, self.down, self.up

    def some(self, chosen: Int[Tensor, " some"]) -> "Tile":
        """Return the tile of some units."""
        return Tile(*(x.index_select(0, chosen) for x in self.tensors()))

    def first(self) -> Tensor:
        """Return the moves of a round that knows of no others."""
        return self.possible(self.wanted.clone())

    def possible(self, wanted: Float[Tensor, "units rows columns"]) -> Tensor:
        """Return the integers nearest to what is wanted that stay in the range, in its memory."""
        moves = wanted.round_()
        # a clamp with tensors would take four times as long
        return torch.minimum(torch.maximum(moves, self.down, out=moves), self.up, out=moves)


def find_moves(
    tile: Tile, later: Float[Tensor, "#units columns columns"]
) -> Float[Tensor, "units rows columns"]:
    """Return the moves of a visit of weight after weight, where rows don't depend on each other.

    On an accelerator they are 0 behind the first that is not settled after ``ROUNDS`` rounds. A move by 1
    adds ``later`` to the wanted moves of the columns to come; it is 0 on the diagonal and below.
    """
    if tile.wanted.device.type != "cpu":
        return settled_moves(tile, later)
    latest = moves = tile.first()
    among = unsettled = moving(moves)
    for _ in range(tile.wanted[0].numel()):  # NaN would go on for ever
        if not unsettled.numel():
            break
        if len(later) == 1 and 2 * len(unsettled) <= len(moves):
            among = unsettled if moves is latest else among[unsettled]
            tile, moves = tile.some(unsettled), moves.index_select(0, unsettled)
        before, moves = moves, tile.possible(plus_times(tile.wanted, moves, later))
        if len(moves) == len(latest):
            latest = moves
        else:
            latest.index_copy_(0, among, moves)
        unsettled = moving(moves - before)
    return latest


def find_coupled_moves(
    tile: Tile, both: Float[Tensor, "columns twice_columns"], below: Float[Tensor, "units rows rows"]
) -> Float[Tensor, "units rows columns"]:
    """Return the moves of a visit of weight after weight, where G couples the rows.

    They are 0 behind the first that is not settled after all rounds. A move by 1 adds the first half of
    ``both`` to the wanted moves of all these columns; the second half is the part of it above the diagonal,
    ``later`` of ``find_moves``. A move of a row adds ``below`` of that to each row to come; it is 0 on the
    diagonal and above.
    """
    on_cpu = tile.wanted.device.type == "cpu"
    rounds = CPU_COUPLED_ROUNDS if on_cpu else COUPLED_ROUNDS
    return coupled_moves(tile, both, below, rounds, ends_early=on_cpu)


def moving(moves: Float[Tensor, "units rows columns"]) -> Int[Tensor, " some"]:
    """Return the units with a move that is not 0."""
    # a sixth of the time of any() on numbers
    lengths: Tensor = torch.linalg.vector_norm(moves.flatten(1), dim=-1)
    return lengths.nonzero()[:, 0]


def settled_moves(
    tile: Tile, later: Float[Tensor, "#units columns columns"]
) -> Float[Tensor, "units rows columns"]:
    """Return the moves that are settled after ``ROUNDS`` rounds, the others 0; arguments as above."""
    moves = before = tile.first()
    for _ in range(ROUNDS - 1):
        before, moves = moves, tile.possible(plus_times(tile.wanted, moves, later))
    return _settled(moves, before)


def coupled_moves(
    tile: Tile, both: Tensor, below: Tensor, rounds: int, *, ends_early: bool
) -> Float[Tensor, "units rows columns"]:
    """Return the moves that are settled after at most so many rounds, the others 0; arguments as above.

    A visit that ``ends_early`` asks after each round whether all moves are settled.
    """
    coupling = _Coupling(tile, both, below)
    moves = before = tile.first()
    for _ in range(rounds - 1):
        before, moves = moves, coupling.round(moves)
        if ends_early and torch.equal(moves, before):
            return moves
    return _settled(moves.flatten(1), before.flatten(1)).view_as(moves)


def _settled(moves: Tensor, before: Tensor) -> Tensor:
    """Return the moves up to the first that the last round changed, which is right itself; then 0."""
    changed = (moves != before).to(torch.uint8)
    return moves * (changed.cumsum(-1) <= changed)


class _Coupling:
    """Finds the moves of a round where G couples the rows, in memory that all rounds share."""

    def __init__(self, tile: Tile, both: Tensor, below: Tensor) -> None:
        self._tile, self._both, self._below = tile, both, below
        units, rows, columns = tile.wanted.shape
        product = tile.wanted.new_empty(units, rows, 2 * columns)
        self._flat_product = product.view(-1, 2 * columns)
        self._of_rows_above, self._of_this_row = product.chunk(2, -1)
        # one tensor for both would take 5 % longer: their addresses may differ by whole pages
        self._next = tile.wanted.new_empty(units, rows, columns)
        self._last = tile.wanted.new_empty(units, rows, columns)

    def round(self, moves: Tensor) -> Tensor:
        """Return the next moves, in memory that the round after the next one takes."""
        torch.mm(moves.view(-1, moves.shape[-1]), self._both, out=self._flat_product)
        wanted, self._next, self._last = self._next, self._last, self._next
        torch.baddbmm(self._tile.wanted, self._below, self._of_rows_above, out=wanted)
        return self._tile.possible(wanted.add_(self._of_this_row))


def times(
    delta: Float[Tensor, "units rows columns"], H: Float[Tensor, "#units columns some"]
) -> Float[Tensor, "units rows some"]:
    """Return ``delta H``, as one large product where all units share H."""
    return delta @ (H[0] if len(H) == 1 else H)


def plus_times(
    total: Float[Tensor, "units rows some"],
    moves: Float[Tensor, "units rows columns"],
    H: Float[Tensor, "#units columns some"],
) -> Float[Tensor, "units rows some"]:
    """Return ``total + moves H`` in new memory."""
    if len(H) == 1:
        flat = torch.addmm(total.flatten(0, 1), moves.flatten(0, 1), H[0])
        return flat.view_as(total)
    return torch.baddbmm(total, moves, H)


def add_times(
    total: Float[Tensor, "units rows some"],
    delta: Float[Tensor, "units rows columns"],
    H: Float[Tensor, "#units columns some"],
) -> None:
    """Add ``delta H`` to a sum, in place, without memory for the product."""
    if len(H) == 1:
        total.view(-1, total.shape[-1]).addmm_(delta.flatten(0, 1), H[0])
    else:
        total.baddbmm_(delta, H)
