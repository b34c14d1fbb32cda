"""List the block types of GGUF as data, and hold the numbers that such a type stores of a matrix.

A *block* is ``block`` columns of a row with one float16 factor d (and one d_min); a *group* is ``group``
columns of it with small integers a and c of their own. The weight is

    d a q - d_min c                 where a type stores minimums
    d a (q - zero_point)            where its zero point is fixed

A type without sub-scales has one group a block, and a = c = 1. The integers q of most types are all of
``0 .. largest``; those of IQ4_NL and IQ4_XS are 16 *levels* among them, closer to each other in the middle.

Source: ``ggml-common.h``, ``ggml-quants.h`` and ``dequantize_row_*`` in ``ggml-quants.c`` of llama.cpp.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import cast

import torch
from jaxtyping import Float, Float16, Float32, Integer, UInt8
from torch import Tensor


@dataclass(frozen=True)
class GridType:
    """Describes a block type by its name in llama.cpp."""

    name: str
    bits: int
    """Bits that an integer q takes in a file."""
    group: int
    block: int
    zero_point: int | None
    """The integer that stands for 0; None where the type stores minimums."""
    scales: tuple[int, int] = (1, 1)
    """Least and largest a."""
    minimums: tuple[int, int] = (0, 0)
    """Least and largest c."""
    levels: tuple[int, ...] | None = None
    """The integers q, in rising order from 0; None: ``0 .. 2^bits - 1``."""

    @property
    def largest(self) -> int:
        """Return the largest integer q."""
        return int(2**self.bits - 1) if self.levels is None else self.levels[-1]

    @property
    def distance(self) -> int:
        """Return the mean distance of two neighbouring integers q."""
        return self.largest // int(2**self.bits - 1)

    @property
    def integers(self) -> "Integers":
        """Return the integers q."""
        return self.levels or self.largest

    @property
    def offset(self) -> int:
        """Return what is subtracted from q before it is multiplied: the zero point, where it is fixed."""
        return self.zero_point or 0

    @property
    def groups(self) -> int:
        """Return the number of groups of a block."""
        return self.block // self.group

    @property
    def stored_numbers(self) -> float:
        """Return how many numbers beside the integer the type has for each weight: d, d_min, a and c."""
        of_block = 1 + (self.minimums != (0, 0))
        of_group = (self.scales != (1, 1)) + (self.minimums[1] > 1)
        return of_block / self.block + of_group / self.group

    @property
    def has_integers(self) -> bool:
        """Return whether a group has integers a or c of its own."""
        return any(low != high for low, high in (self.scales, self.minimums))

    def nearest_(self, steps: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Return the nearest ``q - offset`` to weights in steps of the grid, in the memory of the steps."""
        if self.levels is None:
            return steps.round_().clamp_(-self.offset, self.largest - self.offset)
        index = _interval(steps.add_(self.offset), self.levels)
        table = _nearest_levels(self.levels, steps.device, steps.dtype) - self.offset
        return torch.index_select(table, 0, index, out=steps.flatten()).view(steps.shape)

    def each_group(self, value: Float[Tensor, "*rows blocks"], groups: int) -> Tensor:
        """Return a number of each block for each of its groups, of which a row has so many."""
        return value.repeat_interleave(self.groups, -1)[..., :groups]

    @property
    def scale_type(self) -> torch.dtype:
        """Return the type that holds every a."""
        return torch.int8 if self.scales[0] < 0 else torch.uint8

    def fits(self, columns: int) -> bool:
        """Return whether a row of so many columns is whole blocks."""
        return columns % self.block == 0


LEVELS = (0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240)
"""Levels of IQ4_NL and IQ4_XS: the values of ``kvalues_iq4nl``, -127 to 113, plus 127."""

TYPES: dict[str, GridType] = {
    kind.name: kind
    for kind in (
        GridType("Q2_K", 2, 16, 256, None, (0, 15), (0, 15)),
        GridType("Q3_K", 3, 16, 256, 4, (-32, 31)),
        GridType("Q4_K", 4, 32, 256, None, (0, 63), (0, 63)),
        GridType("Q5_K", 5, 32, 256, None, (0, 63), (0, 63)),
        GridType("Q6_K", 6, 16, 256, 32, (-128, 127)),
        GridType("Q2_0", 2, 64, 64, 1),
        GridType("Q4_0", 4, 32, 32, 8),
        GridType("Q4_1", 4, 32, 32, None, minimums=(1, 1)),
        GridType("IQ4_NL", 4, 32, 32, 127, levels=LEVELS),
        GridType("IQ4_XS", 4, 32, 256, 127, (-32, 31), levels=LEVELS),
        GridType("Q5_0", 5, 32, 32, 16),
        GridType("Q5_1", 5, 32, 32, None, minimums=(1, 1)),
        GridType("Q8_0", 8, 32, 32, 128),
    )
}
"""Block types by name."""


@dataclass(frozen=True)
class TypedWeight:
    """Holds a weight ``[rows, d_in]`` by the numbers that a block type stores.

    In a run's ``blocks/*.safetensors`` each tensor of it is ``PROJECTION.FIELD``. A last block of a row may
    have fewer columns; only such matrices are no file of llama.cpp.
    """

    integers: UInt8[Tensor, "rows d_in"]
    """q; a type that stores q - zero_point, or the number of a level, is packed from it."""
    d: Float16[Tensor, "rows blocks"]
    """Factor of the scales; negative in some blocks of types with a fixed zero point."""
    d_min: Float16[Tensor, "rows blocks"] | None = None
    """Factor of the minimums, which are subtracted: the m of Q4_1 and Q5_1, which is added, is -d_min."""
    sub_scale: Integer[Tensor, "rows groups"] | None = None
    """a, int8 where it can be negative and uint8 otherwise; Q3_K's file has a + 32. None where it is 1."""
    sub_min: UInt8[Tensor, "rows groups"] | None = None
    """c; None where there is none or it is 1."""
    kind: GridType = field(kw_only=True)

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], name: str, kind: GridType) -> "TypedWeight":
        """Return what ``tensors`` has by ``NAME.FIELD``, of a type."""
        return cls(
            **{part: tensors[f"{name}.{part}"] for part in TENSORS if f"{name}.{part}" in tensors}, kind=kind
        )

    @property
    def bits(self) -> int:
        """Return the bits of an integer."""
        return self.kind.bits

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that there are, by the names of their fields."""
        return {part: value for part in TENSORS if (value := getattr(self, part)) is not None}

    def split(self, size: int) -> "Iterator[TypedWeight]":
        """Yield so many rows after the other."""
        pieces = (value.split(size) for value in self.tensors().values())
        for piece in zip(*pieces, strict=True):
            yield TypedWeight(**dict(zip(self.tensors(), piece, strict=True)), kind=self.kind)

    def grid(self) -> tuple[Float32[Tensor, "rows groups"], Float32[Tensor, "rows groups"]]:
        """Return scale and minimum of each group: the weight is ``scale * q - minimum``; both are exact."""
        kind, groups = self.kind, -(-self.integers.shape[1] // self.kind.group)

        def product(d: Tensor, factor: Tensor | None) -> Tensor:
            value = kind.each_group(d.float(), groups)
            return value if factor is None else value * factor

        scale = product(self.d, self.sub_scale)
        if kind.zero_point is not None:
            return scale, scale * kind.zero_point
        return scale, product(cast(Tensor, self.d_min), self.sub_min)

    def weight(self) -> Float[Tensor, "rows d_in"]:
        """Return the weight in float32, as llama.cpp computes it to the bit."""
        q = self.integers.to(torch.float32)
        columns = [x.repeat_interleave(self.kind.group, 1)[:, : q.shape[1]] for x in self.grid()]
        return columns[0] * q - columns[1]

    def moved(self, steps: Float[Tensor, "rows d_in"]) -> "TypedWeight":
        """Return the weight with integers that are nearest after so many steps, of their mean distance."""
        q = nearest(self.integers + steps.float() * self.kind.distance, self.kind.integers)
        return replace(self, integers=q.to(torch.uint8))

    def rows(self, order: Tensor) -> "TypedWeight":
        """Return some rows of the weight, or all of them in another order."""
        return TypedWeight(**{k: v[order] for k, v in self.tensors().items()}, kind=self.kind)


TENSORS = tuple(f.name for f in fields(TypedWeight) if f.name != "kind")
"""Fields of a weight that are tensors."""


@dataclass(frozen=True)
class Factors:
    """Holds what makes a grid out of a block type's numbers, in float32; a block is as above."""

    kind: GridType
    d: Float[Tensor, "heads rows blocks"]
    a: Float[Tensor, "heads rows groups"]
    """Never 0: with another integer q everywhere, any a stands for the same values."""
    d_min: Float[Tensor, "heads rows blocks"]
    c: Float[Tensor, "heads rows groups"]
    """0 where the zero point is fixed."""

    def values(self) -> tuple[Tensor, Tensor]:
        """Return scale and minimum ``[heads, rows, groups]``: a weight is ``scale * q - minimum``."""
        kind, groups = self.kind, self.a.shape[-1]
        scale = kind.each_group(self.d, groups) * self.a
        return scale, scale * kind.offset + kind.each_group(self.d_min, groups) * self.c

    def merged(self, merge: Callable[..., Tensor], *others: "Factors") -> "Factors":
        """Return what ``merge`` makes of each tensor, and of the same one of others."""
        tensors = zip(*((f.d, f.a, f.d_min, f.c) for f in (self, *others)), strict=True)
        return Factors(self.kind, *(merge(*same) for same in tensors))

    def stored(self, integers: UInt8[Tensor, "rows d_in"]) -> TypedWeight:
        """Return what the type stores of a weight, for a d that float16 holds; heads follow each other."""
        kind, (low, high) = self.kind, self.kind.minimums
        d, d_min, a, c = (x.flatten(0, 1) for x in (self.d, self.d_min, self.a, self.c))
        return TypedWeight(
            integers,
            d.to(torch.float16),
            d_min.to(torch.float16) if high else None,
            None if kind.scales == (1, 1) else a.to(kind.scale_type),
            c.to(torch.uint8) if low < high else None,
            kind=kind,
        )


Integers = int | tuple[int, ...]
"""The integers that a grid has: the largest of ``0 .. largest``, or levels."""


def nearest(value: Float[Tensor, "*any"], integers: Integers) -> Float[Tensor, "*any"]:
    """Return the nearest integers of a grid; halves go to the even neighbour, or to the higher level.

    Without levels a NaN stays one; among levels it becomes any of them.
    """
    if isinstance(integers, int):
        return value.round().clamp_(0, integers)
    table = _nearest_levels(integers, value.device, value.dtype)
    return table.index_select(0, _interval(value.clone(), integers)).view(value.shape)


def nearest_to(
    steps: Float[Tensor, "*any"], zero: tuple[Tensor | int, Tensor | int], integers: Integers
) -> Float[Tensor, "*any"]:
    """Return the nearest integers to weights in steps of the grid; ``zero`` as of ``split_zero``."""
    whole, rest = zero
    if isinstance(integers, int):
        return (steps + rest).round_().add_(whole).clamp_(0, integers)
    return nearest(steps + whole, integers)  # all have one zero point, which is whole


def neighbours(
    value: Float[Tensor, "*any"], levels: tuple[int, ...]
) -> tuple[Float[Tensor, "*any"], Float[Tensor, "*any"]]:
    """Return the largest level that is not above a value, or -1, and the next, or ``largest + 1``."""
    each = value.new_tensor((-1, *levels, levels[-1] + 1))
    index = torch.bucketize(value, each[1:-1], right=True)
    return each[index], each[index + 1]


def _interval(value: Float[Tensor, "*any"], levels: tuple[int, ...]) -> Integer[Tensor, " all"]:
    """Return the half-open interval of length 1/2 that a number is in, which says the nearest level.

    The numbers are lost.
    """
    return value.mul_(2).clamp_(0, 2 * levels[-1]).nan_to_num_().to(torch.int32).flatten()


@cache
def _nearest_levels(levels: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the nearest level for ``k/2 <= value < (k + 1)/2``, for all k."""
    ends = torch.tensor(levels, dtype=dtype)
    middle = torch.arange(2 * levels[-1] + 1, dtype=dtype) / 2 + 0.25
    return ends[(middle[:, None] - ends).abs().argmin(1)].to(device)


def round_to_half(scale: Tensor) -> Tensor:
    """Round scales to values that float16 holds, in the type that they came in.

    Engines store float16 scales; rounding here, before the integers are chosen, makes every export
    exact. What float16 cannot hold becomes its nearest number of the same sign, which is not 0.
    """
    half = torch.finfo(torch.float16)
    smallest = half.smallest_normal * half.eps  # subnormal numbers hold scales of tiny weights
    size = scale.abs().clamp(smallest, half.max).to(torch.float16).to(scale.dtype)
    return torch.where(scale < 0, -size, size)
