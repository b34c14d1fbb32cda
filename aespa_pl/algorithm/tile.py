"""Find the moves of coordinate descent in a tile: some rows and columns of each unit, visited in turn.

A move depends on those before it. All moves are found at once, again and again, with the effects of the
moves that were found before: so the first is right at once, the second when the first is, and so on. As
few moves matter to others, all are settled after a few rounds.

A CPU goes on until all are settled. On an accelerator the host would have to wait for each answer, so there a
visit has a fixed number of rounds. The moves behind the first that is not settled are left to the next visit.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from aespa_pl.algorithm.replay import Replayed

ROUNDS, COUPLED_ROUNDS = 4, 8
"""Rounds of a visit on an accelerator, without G and with it; two at least, to tell what is settled."""
LOOKS = (8, 24)
"""Rounds after which a CPU looks which heads have settled, and goes on with the others if these are half or
less. A look takes as long as half a round."""


@dataclass
class Tile:
    """Holds what the moves of some rows and columns of each unit depend on."""

    P: Float[Tensor, "units rows columns"]
    """Half the gradient with respect to ``dW``."""
    step: Float[Tensor, "units rows columns"]
    newton: Float[Tensor, "units rows columns"]
    """What P is multiplied with for the best move, before it is rounded."""
    down: Float[Tensor, "units rows columns"]
    """The least moves that stay in the range."""
    up: Float[Tensor, "units rows columns"]
    """The largest moves that stay in the range."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all fields, in the order of the constructor."""
        return self.P, self.step, self.newton, self.down, self.up

    def some(self, chosen: Int[Tensor, " some"]) -> "Tile":
        """Return the tile of some units."""
        return Tile(*(x.index_select(0, chosen) for x in self.tensors()))

    def contiguous(self) -> "Tile":
        """Return the same tile in memory of its own, which many rounds read faster."""
        return Tile(*(x.contiguous() for x in self.tensors()))

    def nearest(self, gradient: Float[Tensor, "units rows columns"]) -> Tensor:
        """Return the best moves for half a gradient, in its memory."""
        moves = gradient.mul_(self.newton).round_()
        # a clamp with tensors would take four times as long
        return torch.minimum(torch.maximum(moves, self.down, out=moves), self.up, out=moves)


def find_moves(
    tile: Tile, later: Float[Tensor, "#units columns columns"], rounds: Replayed
) -> Float[Tensor, "units rows columns"]:
    """Return the moves of a visit of weight after weight, where rows don't depend on each other.

    Args:
        tile: Rows and columns to visit.
        later: Part of the damped Hessian above the diagonal: what a move changes for the columns to come.
        rounds: ``settled_moves``, for accelerators.
    """
    if tile.P.device.type != "cpu":
        return rounds(later, *tile.tensors())[0]
    found = moves = tile.nearest(tile.P.clone())
    among = unsettled = moving(moves)
    for _ in range(tile.P[0].numel()):  # NaN would go on for ever
        if not unsettled.numel():
            break
        if len(later) == 1 and 2 * len(unsettled) <= len(moves):
            among = unsettled if moves is found else among[unsettled]
            tile, moves = tile.some(unsettled), moves.index_select(0, unsettled)
        before = moves
        moves = tile.nearest(tile.P + times(moves * tile.step, later))
        if len(moves) == len(found):
            found = moves
        else:
            found.index_copy_(0, among, moves)
        unsettled = moving(moves - before)
    return found


def find_coupled_moves(
    tile: Tile,
    both: Float[Tensor, "columns twice_columns"],
    own: Float[Tensor, "units rows 1"],
    below: Float[Tensor, "units rows rows"],
    rounds: Replayed,
) -> Float[Tensor, "units rows columns"]:
    """Return the moves of a visit of weight after weight, where G couples the rows.

    Args:
        tile: Rows and columns to visit.
        both: Damped Hessian between these columns, and beside it ``later`` of ``find_moves``.
        own: Diagonal of G, the second moment of the other side, between these rows.
        below: Part of G below the diagonal: what a move changes for the rows to come.
        rounds: ``settled_coupled_moves``, for accelerators.
    """
    if tile.P.device.type != "cpu":
        return rounds(both, own, below, *tile.tensors())[0]
    tile = tile.contiguous()
    found = moves = tile.nearest(tile.P.clone())
    coupling, among = _Coupling(tile.P, both, own, below), torch.arange(len(moves))
    for done in range(1, 1 + tile.P[0].numel()):
        before = moves
        moves = coupling.round(tile, moves)
        if torch.equal(moves, before):
            break
        if done in LOOKS:
            unsettled = moving(moves - before)
            if 2 * len(unsettled) <= len(moves):
                found.index_copy_(0, among, moves)
                among = among[unsettled]
                tile, moves = tile.some(unsettled), moves.index_select(0, unsettled)
                own, below = own.index_select(0, unsettled), below.index_select(0, unsettled)
                coupling = _Coupling(tile.P, both, own, below)
    return found.index_copy_(0, among, moves)


def moving(moves: Float[Tensor, "units rows columns"]) -> Int[Tensor, " some"]:
    """Return the units with a move that is not 0."""
    # a sixth of the time of any() on numbers
    return moves.flatten(1).abs().amax(-1).nonzero()[:, 0]


def settled_moves(later: Tensor, *tile: Tensor) -> tuple[Tensor]:
    """Return the moves that are settled after ``ROUNDS`` rounds, the others 0.

    Args:
        later: Part of the damped Hessian above the diagonal: what a move changes for the columns to come.
        tile: ``Tile.tensors()``, each ``[units, rows, columns]``; one by one, because a graph takes tensors.
    """
    here = Tile(*tile)
    moves = before = here.nearest(here.P.clone())
    for _ in range(ROUNDS - 1):
        before = moves
        moves = here.nearest(here.P + times(moves * here.step, later))
    return (_settled(moves, before),)


def settled_coupled_moves(both: Tensor, own: Tensor, below: Tensor, *tile: Tensor) -> tuple[Tensor]:
    """Return the moves that are settled after ``COUPLED_ROUNDS`` rounds, the others 0.

    Args:
        both: Damped Hessian between these columns, and beside it its part above the diagonal.
        own: Diagonal of G between these rows.
        below: Part of G below the diagonal.
        tile: ``Tile.tensors()``, each ``[units, rows, columns]``; one by one, because a graph takes tensors.
    """
    here = Tile(*tile)
    coupling = _Coupling(here.P, both, own, below)
    moves = before = here.nearest(here.P.clone())
    for _ in range(COUPLED_ROUNDS - 1):
        before = moves
        moves = coupling.round(here, moves)
    return (_settled(moves.flatten(1), before.flatten(1)).view_as(moves),)


def _settled(moves: Tensor, before: Tensor) -> Tensor:
    """Return the moves up to the first that the last round changed, which is right itself; then 0."""
    changed = (moves != before).to(torch.uint8)
    return moves * (changed.cumsum(-1) <= changed)


class _Coupling:
    """Finds the moves of a round where G couples the rows, in memory that all rounds share."""

    def __init__(self, P: Tensor, both: Tensor, own: Tensor, below: Tensor) -> None:
        self._both, self._own, self._below = both, own, below
        self._delta = torch.empty_like(P, memory_format=torch.contiguous_format)
        self._flat_delta = self._delta.view(-1, P.shape[-1])
        product = P.new_empty(*P.shape[:2], both.shape[-1])
        self._flat_product = product.view(-1, both.shape[-1])
        self._of_rows_above, self._of_this_row = product.chunk(2, -1)
        self._next, self._last = torch.empty_like(self._delta), torch.empty_like(self._delta)

    def round(self, tile: Tile, moves: Tensor) -> Tensor:
        """Return the next moves, in memory that the round after the next one takes."""
        torch.mul(moves, tile.step, out=self._delta)
        torch.mm(self._flat_delta, self._both, out=self._flat_product)
        gradient, self._next, self._last = self._next, self._last, self._next
        torch.baddbmm(tile.P, self._below, self._of_rows_above, out=gradient)
        return tile.nearest(gradient.addcmul_(self._own, self._of_this_row))


def times(
    delta: Float[Tensor, "units rows columns"], H: Float[Tensor, "#units columns some"]
) -> Float[Tensor, "units rows some"]:
    """Return ``delta H``, as one large product where all units share H."""
    return delta @ (H[0] if len(H) == 1 else H)


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
