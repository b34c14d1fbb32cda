"""The rows of a projection, divided over the processes of a run.

Rows that share one Hessian don't depend on each other. Those of a head stay together where G couples
them, or where the head has a Hessian of its own.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from aespa_pl.algorithm.hessian import HeadMatrices
from aespa_pl.algorithm.quantizer import Grid
from aespa_pl.distributed.processes import ALONE, Ranks


@dataclass(frozen=True)
class Shard:
    """A process's rows of tensors ``[heads, rows, ...]``, and the way back to all of them.

    A process for which none are left (there may be more processes than heads) works on the first, and
    what comes out is dropped: so all make the same calls, and no shape is empty.
    """

    heads: int
    rows: int
    by_heads: bool
    ranks: Ranks = ALONE

    @classmethod
    def of(cls, W: Tensor, H: Tensor | HeadMatrices, G: Tensor | None, ranks: Ranks) -> "Shard":
        """Divide a projection.

        Args:
            W: ``[heads, rows, d_in]``.
            H: Its Hessian, ``[heads or 1, d_in, d_in]``.
            G: Of the objective in question, ``[heads, rows, rows]`` or None.
            ranks: Over which processes.
        """
        return cls(W.shape[0], W.shape[1], G is not None or H.shape[0] > 1, ranks)

    @property
    def fraction(self) -> float:
        """Share of the whole that is this process's own; 0 if it only works along."""
        return self._count / self._size

    def part(self, tensor: Tensor) -> Tensor:
        """Return this process's part of ``[heads, rows, ...]``; of single rows as of one head."""
        if self.ranks.alone:
            return tensor
        return tensor[self._taken] if self.by_heads else tensor.flatten(0, 1)[self._taken][None]

    def whole(self, part: Tensor) -> Tensor:
        """Return what the parts of all processes make, ``[heads, rows, ...]``."""
        if self.ranks.alone:
            return part
        own = (part if self.by_heads else part[0])[: self._count]
        return self.ranks.gather(own, self._size).view(self.heads, self.rows, *part.shape[2:])

    def of_heads(self, tensor: Tensor) -> Tensor:
        """Return what this process needs of ``[heads, ...]``, or of what all heads share."""
        alike = self.ranks.alone or not self.by_heads or tensor.shape[0] == 1
        return tensor if alike else tensor[self._taken]

    def hessians(self, H: Tensor | HeadMatrices) -> Tensor | HeadMatrices:
        """Return those that this process needs; they stay where they are."""
        if isinstance(H, Tensor):
            return self.of_heads(H)
        return H if self.ranks.alone else H.only(self._taken)

    def grid(self, grid: Grid) -> Grid:
        """Return this process's part of a grid."""
        return replace(grid, scale=self.part(grid.scale), zero_point=self.part(grid.zero_point))

    def whole_grid(self, grid: Grid) -> Grid:
        """Return the grid that the parts of all processes make."""
        return replace(grid, scale=self.whole(grid.scale), zero_point=self.whole(grid.zero_point))

    def sum(self, number: float) -> float:
        """Return the sum over the processes of a number that stands for their own parts."""
        return number if self.ranks.alone else self.ranks.sum(number if self.fraction else 0.0)

    @property
    def _size(self) -> int:
        return self.heads if self.by_heads else self.heads * self.rows

    @property
    def _own(self) -> slice:
        return self.ranks.share(self._size)

    @property
    def _count(self) -> int:
        return int(self._own.stop - self._own.start)

    @property
    def _taken(self) -> slice:
        return self._own if self.fraction else slice(0, 1)
