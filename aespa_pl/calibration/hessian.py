"""Hold damped Hessians, wherever they lie."""

import torch
from torch import Tensor

from aespa_pl.algorithm.hessian import damp
from aespa_pl.storage.batches import Matrices


class Hessian:
    """Holds damped Hessians ``[heads or 1, d_in, d_in]``; a slice of heads is a tensor in memory.

    Damping changes the diagonal in place, because a copy would take as much memory as the matrices do.
    It always starts from the diagonal of the statistics, so it can be changed again.
    """

    def __init__(self, matrices: Matrices) -> None:
        """Take the matrices over, undamped."""
        self._matrices = matrices
        heads = (matrices[h : h + 1] for h in range(len(matrices)))
        self._undamped = torch.cat([head.diagonal(dim1=-2, dim2=-1) for head in heads])
        self._diagonal = self._undamped

    @property
    def in_memory(self) -> bool:
        """Tell whether the matrices of all heads are in memory all the time."""
        return isinstance(self._matrices, Tensor)

    @property
    def dead(self) -> Tensor:
        """Return which inputs are always 0, boolean, ``[heads or 1, d_in]``."""
        return self._undamped == 0

    def damp(self, damping: float) -> None:
        """Add a part of its mean diagonal to the diagonal of each head, in place of any part before."""
        self._diagonal = damp(self._undamped, damping)
        if isinstance(self._matrices, Tensor):
            self._matrices.diagonal(dim1=-2, dim2=-1).copy_(self._diagonal)

    def __len__(self) -> int:
        """Return the number of heads that have a matrix of their own; 1 where all share one."""
        return len(self._matrices)

    def __getitem__(self, heads: slice) -> Tensor:
        """Return the matrices ``[some, d_in, d_in]`` of some heads."""
        matrices = self._matrices[heads]
        if not self.in_memory:
            matrices.diagonal(dim1=-2, dim2=-1).copy_(self._diagonal[heads])
        return matrices
