"""Apply the uniform quantizer ``W_hat = scale * zeta * (q - zero_point)`` (Eq. 3, with Z-Fold's zeta)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Real
from torch import Tensor


@dataclass(frozen=True)
class GridFormat:
    """Says which grids a projection may have."""

    bits: int
    symmetric: bool = False
    """Whether the zero point stands in the middle of the range."""
    group_size: int | None = None
    """Columns that share a scale and a zero point; None: all columns of a row."""

    @property
    def largest(self) -> int:
        """Return the largest integer."""
        return int(2**self.bits - 1)


@dataclass(frozen=True)
class Grid:
    """Describes the values that the weights of one projection can take."""

    scale: Float[Tensor, "heads rows groups"]
    """Distance of two neighbouring values before zeta; a group is ``d_in / groups`` columns."""
    zero_point: Float[Tensor, "heads rows groups"]
    """The integer that stands for 0."""
    zeta: Float[Tensor, " d_in"]
    """Positive factor of each column; all 1 where it cannot be folded."""
    bits: int

    @property
    def largest(self) -> int:
        """Return the largest integer."""
        return int(2**self.bits - 1)

    def step(self) -> Float[Tensor, "heads rows d_in"]:
        """Return the distance of two neighbouring values of each weight."""
        return self._each_column(self.scale) * self.zeta

    def zero(self) -> Float[Tensor, "heads rows d_in"]:
        """Return the zero point of each weight."""
        return self._each_column(self.zero_point)

    def heads(self, first: int, count: int) -> "Grid":
        """Return the grid of the heads ``first .. first + count - 1``."""
        chosen = slice(first, first + count)
        return Grid(self.scale[chosen], self.zero_point[chosen], self.zeta, self.bits)

    def _each_column(self, value: Tensor) -> Tensor:
        return value.repeat_interleave(self.zeta.numel() // value.shape[-1], dim=-1)


def quantize(W: Float[Tensor, "heads rows d_in"], grid: Grid) -> Float[Tensor, "heads rows d_in"]:
    """Return the nearest integers (round-to-nearest; halves go to the even neighbour)."""
    return torch.clamp(torch.round(W / grid.step()) + grid.zero(), 0, grid.largest)


def dequantize(
    integers: Real[Tensor, "heads rows d_in"], grid: Grid
) -> Float[Tensor, "heads rows d_in"]:
    """Return the weights that the integers stand for."""
    return grid.step() * (integers - grid.zero())


def round_to_half(scale: Tensor) -> Tensor:
    """Round positive scales to values that float16 holds, in the type that they came in.

    Engines store float16 scales; rounding here, before the integers are chosen, makes every export
    exact. What float16 cannot hold becomes its nearest positive number.
    """
    half = torch.finfo(torch.float16)
    smallest = half.smallest_normal * half.eps  # subnormal numbers hold scales of tiny weights
    return scale.clamp(smallest, half.max).to(torch.float16).to(scale.dtype)
