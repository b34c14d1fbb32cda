"""Compute the loss of a group as a function of its scale S and its minimum M, and the lowest point.

    loss = A S^2 - 2 B S M + C M^2 - 2 D S + 2 E M

The group's weights are ``S x - M y``. With its weights v and its Hessian H these are ``A = x H x``,
``B = x H y``, ``C = y H y``, ``D = x H v`` and ``E = y H v``, and the loss is that of v less ``v H v``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TINY = 1e-30
"""Least divisor: below it all weights of a group are 0."""
SINGULAR = 1e-6
"""Least determinant beside ``A C``, below which x and y are too much alike for a scale and a minimum."""


@dataclass(frozen=True)
class Parabola:
    """Holds the numbers of the loss, one of each for each group."""

    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    E: Tensor

    def at(self, S: Tensor, M: Tensor) -> Tensor:
        """Return the loss."""
        return S * (self.A * S - 2 * self.B * M - 2 * self.D) + M * (self.C * M + 2 * self.E)

    def lowest_scale(self) -> Tensor:
        """Return the best scale beside the minimum 0."""
        return self.D / self.A.clamp(min=TINY)

    def lowest_minimum(self, S: Tensor) -> Tensor:
        """Return the best minimum beside a scale."""
        return (self.B * S - self.E) / self.C.clamp(min=TINY)

    def lowest(self) -> tuple[Tensor, Tensor]:
        """Return scale and minimum of the lowest point; where there is no single one the minimum is 0."""
        determinant = self.A * self.C - self.B.square()
        scale = (self.C * self.D - self.B * self.E) / determinant.clamp(min=TINY)
        single = determinant > SINGULAR * self.A * self.C
        scale = torch.where(single, scale, self.lowest_scale())
        return scale, torch.where(single, self.lowest_minimum(scale), 0)
