"""Divide the rows of a projection over the processes of a run.

Rows that share one Hessian don't depend on each other. Those of a head stay together where G couples
them, or where the head has a Hessian of its own.
"""

from dataclasses import dataclass

from torch import Tensor

from aespa_pl.algorithm.quantizer import Grid
from aespa_pl.distributed.processes import ALONE, World


@dataclass(frozen=True)
class RowShare:
    """Takes one process's rows of tensors ``[heads, rows, ...]``, and puts the rows of all together.

    A process for which no rows are left (there may be more processes than heads) works on the first, and
    its result is dropped. So all processes make the same calls, and no shape is empty.
    """

    heads: int
    rows: int
    by_heads: bool  # whether whole heads are divided; otherwise single rows are
    world: World = ALONE

    @property
    def fraction(self) -> float:
        """Return the share of all rows that this process answers for; 0 if it only works along."""
        return len(self._own) / self._size

    @property
    def taken_heads(self) -> slice:
        """Return the heads that this process works on; all of them where single rows are divided."""
        divided = self.by_heads and not self.world.alone
        return slice(*self._taken.indices(self.heads)) if divided else slice(0, self.heads)

    def part(self, tensor: Tensor) -> Tensor:
        """Return this process's part of ``[heads, rows, ...]``; single rows count as one head."""
        if self.world.alone:
            return tensor
        return tensor[self._taken] if self.by_heads else tensor.flatten(0, 1)[self._taken][None]

    def whole(self, part: Tensor) -> Tensor:
        """Return ``[heads, rows, ...]`` from the parts of all processes."""
        if self.world.alone:
            return part
        own = (part if self.by_heads else part[0])[: len(self._own)]
        return self.world.gather(own, self._size).view(self.heads, self.rows, *part.shape[2:])

    def grid(self, grid: Grid) -> Grid:
        """Return this process's part of a grid."""
        return grid.merged(self.part)

    def whole_grid(self, grid: Grid) -> Grid:
        """Return the grid of all rows from the parts of all processes."""
        return grid.merged(self.whole)

    def sum(self, number: float) -> float:
        """Return the sum over the processes of a number that each has for its own rows."""
        return number if self.world.alone else self.world.sum(number if self.fraction else 0.0)

    @property
    def _size(self) -> int:
        return self.heads if self.by_heads else self.heads * self.rows

    @property
    def _own(self) -> range:
        return range(self._size)[self.world.indices(self._size)]

    @property
    def _taken(self) -> slice:
        return slice(self._own.start, self._own.stop) if self._own else slice(0, 1)
