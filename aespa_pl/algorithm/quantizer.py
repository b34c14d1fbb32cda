"""Apply the uniform quantizer ``W_hat = scale * zeta * (q - zero_point)`` (Eq. 3, with Z-Fold's zeta).

A weight as engines store it has no zeta: it is folded into what comes before. Block types of GGUF are such
grids too: a weight ``d a q - d_min c`` has the scale ``d a`` and the zero point ``d_min c / (d a)``, which is
no integer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Real, UInt8
from torch import Tensor

from aespa_pl.algorithm.grid_types import (
    TYPES,
    Factors,
    GridType,
    Integers,
    TypedWeight,
    nearest,
    nearest_to,
    round_to_half,
)


@dataclass(frozen=True)
class GridFormat:
    """Says which grids a projection may have."""

    bits: int
    symmetric: bool = False
    """Whether the zero point stands in the middle of the range."""
    group_size: int | None = None
    """Columns that share a scale and a zero point; None: all columns of a row."""
    kind: GridType | None = None
    """Block type that the grids are held by; its bits and groups are those above."""

    @classmethod
    def of(cls, kind: GridType) -> "GridFormat":
        """Return the format of a block type."""
        return cls(kind.bits, kind.zero_point is not None, kind.group, kind)


@dataclass(frozen=True)
class Grid:
    """Describes the values that the weights of one projection can take."""

    scale: Float[Tensor, "heads rows groups"]
    """Distance of two neighbouring values before zeta; a group is ``d_in / groups`` columns."""
    zero_point: Float[Tensor, "heads rows groups"]
    """The integer that stands for 0; of block types with minimums any number."""
    zeta: Float[Tensor, " d_in"]
    """Positive factor of each column; all 1 where it cannot be folded."""
    bits: int
    factors: Factors | None = None
    """Numbers of a block type that scale and zero point are made of."""

    @classmethod
    def of(cls, factors: Factors, zeta: Float[Tensor, " d_in"]) -> "Grid":
        """Return the grid that a block type's numbers stand for."""
        scale, minimum = factors.values()
        return cls(scale, minimum / scale, zeta, factors.kind.bits, factors)

    @property
    def levels(self) -> tuple[int, ...] | None:
        """Return the integers that weights can have, where they are not all of ``0 .. largest``."""
        return None if self.factors is None else self.factors.kind.levels

    @property
    def largest(self) -> int:
        """Return the largest integer."""
        return int(2**self.bits - 1) if self.levels is None else self.levels[-1]

    @property
    def integers(self) -> Integers:
        """Return the integers that weights can have."""
        return self.levels or self.largest

    @property
    def form(self) -> tuple[int, GridType | None]:
        """Return bits and block type; grids of one form can be joined."""
        return self.bits, None if self.factors is None else self.factors.kind

    def step(self) -> Float[Tensor, "heads rows d_in"]:
        """Return the distance of two neighbouring values of each weight."""
        return self._each_column(self.scale) * self.zeta

    def zero(self) -> Float[Tensor, "heads rows d_in"]:
        """Return the zero point of each weight."""
        return self._each_column(self.zero_point)

    def heads(self, first: int, count: int) -> "Grid":
        """Return the grid of the heads ``first .. first + count - 1``."""
        return self.merged(lambda x: x[first : first + count])

    def merged(self, merge: Callable[..., Tensor], *others: "Grid") -> "Grid":
        """Return what ``merge`` makes of each tensor ``[heads, rows, ...]``; ValueError: the forms differ."""
        grids = (self, *others)
        if any(grid.form != self.form for grid in others):
            raise ValueError("grids of several bits or block types cannot be joined")
        if self.factors is not None:
            rest = [grid.factors for grid in others if grid.factors is not None]
            return Grid.of(self.factors.merged(merge, *rest), self.zeta)
        scale = merge(*(grid.scale for grid in grids))
        return replace(self, scale=scale, zero_point=merge(*(grid.zero_point for grid in grids)))

    def in_half(self, row_factor: Float[Tensor, "heads rows"]) -> "Grid":
        """Return the grid whose scales, times a factor of each row, are numbers that float16 holds."""
        return self._scaled(
            lambda d: round_to_half(d * row_factor[..., None]) / row_factor[..., None], self.zeta
        )

    def folded(self, row_factor: Float[Tensor, "heads rows"]) -> "Grid":
        """Return the grid as it is stored: zeta is 1, rows have their factor, float16 holds every scale."""
        return self._scaled(lambda d: round_to_half(d * row_factor[..., None]), torch.ones_like(self.zeta))

    def _scaled(self, change: Callable[[Tensor], Tensor], zeta: Tensor) -> "Grid":
        f = self.factors
        if f is not None:
            return Grid.of(replace(f, d=change(f.d), d_min=change(f.d_min)), zeta)
        return replace(self, scale=change(self.scale), zeta=zeta)

    def _each_column(self, value: Tensor) -> Tensor:
        return value.repeat_interleave(self.zeta.numel() // value.shape[-1], dim=-1)


def joined(grids: Sequence[Grid]) -> Grid:
    """Return the heads of several grids as one grid's."""
    return grids[0].merged(lambda *same: torch.cat(same), *grids[1:])


def quantize(W: Float[Tensor, "heads rows d_in"], grid: Grid) -> Float[Tensor, "heads rows d_in"]:
    """Return the nearest integers (round-to-nearest; halves go to the even neighbour)."""
    return nearest_to(W / grid.step(), split_zero(grid.zero()), grid.integers)


def split_zero(zero: Float[Tensor, "..."]) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Return zero points as whole numbers and rests; the rests of uniform grids are 0."""
    whole = zero.round()
    return whole, zero - whole


def dequantize(integers: Real[Tensor, "heads rows d_in"], grid: Grid) -> Float[Tensor, "heads rows d_in"]:
    """Return the weights that the integers stand for."""
    return grid.step() * (integers - grid.zero())


@dataclass(frozen=True)
class QuantizedWeight:
    """Holds a weight as engines store it, ``scale * (integers - zero_point)``."""

    integers: UInt8[Tensor, "rows d_in"]
    scale: Float[Tensor, "rows groups"]
    """Scales, in values that float16 holds; a group is ``d_in / groups`` columns."""
    zero_point: Real[Tensor, "rows groups"]
    bits: int

    def __post_init__(self) -> None:
        """Refuse integers and zero points that the bits don't hold."""
        largest = max((int(x.max()) for x in (self.integers, self.zero_point) if x.numel()), default=0)
        if largest >= 2**self.bits:
            raise ValueError(f"integers or zero points up to {largest} do not have {self.bits} bits")

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by the names of their fields, in the types that they are stored in."""
        scale, zero_point = self.scale.to(torch.float16), self.zero_point.to(torch.uint8)
        return {"integers": self.integers, "scale": scale, "zero_point": zero_point}

    @property
    def group_size(self) -> int:
        """Return the number of columns that share a scale."""
        return self.integers.shape[1] // self.scale.shape[1]

    def each_column(self, value: Tensor) -> Float[Tensor, "rows d_in"]:
        """Return a value of each group ``[rows, groups]`` for each weight, in float32."""
        return value.float().repeat_interleave(self.group_size, dim=1)

    def weight(self) -> Float[Tensor, "rows d_in"]:
        """Return the weight in float32, where every product is exact, because it has 20 bits at most."""
        return scaled_steps(self.integers, self.scale.float(), self.zero_point.float())

    def moved(self, steps: Float[Tensor, "rows d_in"]) -> "QuantizedWeight":
        """Return the weight with the integers that are nearest after so many steps."""
        q = nearest(self.integers + steps.float(), 2**self.bits - 1)
        return replace(self, integers=q.to(torch.uint8))

    def rows(self, order: Tensor) -> "QuantizedWeight":
        """Return some rows of the weight, or all of them in another order."""
        integers, scale, zero = (x[order] for x in (self.integers, self.scale, self.zero_point))
        return QuantizedWeight(integers, scale, zero, self.bits)


StoredWeight = QuantizedWeight | TypedWeight
"""Weight as it is stored, on a uniform grid or by a block type."""


def weight_tensors(weights: Mapping[str, StoredWeight]) -> dict[str, Tensor]:
    """Return the tensors of a block's file that hold its weights, which are given by projection."""
    return {f"{name}.{part}": value for name, q in weights.items() for part, value in q.tensors().items()}


def read_weight(tensors: Mapping[str, Tensor], name: str, bits: int, kind: str | None) -> StoredWeight:
    """Return a projection's weight from what ``weight_tensors`` made; without a block type it is uniform.

    Raises ValueError where a uniform one has numbers that the bits don't hold.
    """
    if kind is not None:
        return TypedWeight.read(tensors, name, TYPES[kind])
    integers, scale, zero_point = (tensors[f"{name}.{part}"] for part in ("integers", "scale", "zero_point"))
    return QuantizedWeight(integers, scale, zero_point, bits)


def scaled_steps(
    integers: Real[Tensor, "rows d_in"],
    scale: Float[Tensor, "rows groups"],
    zero_point: Float[Tensor, "rows groups"],
) -> Float[Tensor, "rows d_in"]:
    """Return ``scale * (integers - zero_point)``."""
    steps = integers.unflatten(1, (scale.shape[1], -1)) - zero_point[..., None]
    return torch.flatten(scale[..., None] * steps, 1)
