"""Choose the smallest block type of GGUF that holds ``scale * (q - z)`` exactly, and store a matrix in it.

A type with minimums and sub-scales computes ``d a q - d_min c``: with d = d_min = scale, a = 1 and c = z that
is the same number. A type with a fixed zero point p stores ``q - z + p``; where that does not fit, the
negative scale and ``z - q + p`` may: so Q2_0, whose p is 1, holds 2 bits with the zero points 1 and 2. Q4_1
and Q5_1 are not exact, because they store ``scale * z`` rounded to float16.
"""

from collections.abc import Collection

import torch

from aespa_pl.algorithm.grid_types import GridType, TypedMatrix
from aespa_pl.algorithm.quantizer import QuantizedWeight
from aespa_pl.export.gguf_bytes import BLOCK_TYPES, BlockType


def zero_points(bits: int, *, symmetric: bool) -> Collection[int]:
    """Return the zero points that a grid may have."""
    return {2 ** (bits - 1)} if symmetric else range(2**bits)


def smallest_type(
    bits: int, columns: int, group_size: int | None, zeros: Collection[int]
) -> BlockType | None:
    """Return the smallest type that holds a matrix with these zero points exactly, None if there is none."""
    for kind in BLOCK_TYPES.values():
        whole = columns % kind.columns == 0 and (group_size or columns) % kind.columns == 0
        if whole and all(_holds(kind.grid, 2**bits - 1, zero) for zero in zeros):
            return kind
    return None


def as_typed(kind: GridType, matrix: QuantizedWeight) -> TypedMatrix:
    """Return a matrix, which a type holds exactly, as that type stores it."""
    blocks = matrix.group_size // kind.block
    bits = matrix.bits
    d, zero = (x.repeat_interleave(blocks, 1) for x in (matrix.scale.half(), matrix.zero_point))
    one = torch.ones(len(d), d.shape[1] * kind.groups, dtype=torch.uint8)
    if kind.zero_point is None:
        return TypedMatrix(matrix.integers, d, d, one, zero.repeat_interleave(kind.groups, 1))
    direct = torch.tensor([_fits(kind, 2**bits - 1, z) for z in range(2**bits)])
    sign = torch.where(direct[zero.int()], 1, -1)  # [rows, blocks]
    steps = matrix.integers.unflatten(1, (-1, kind.block)).int() - zero[..., None].int()
    stored = (steps * sign[..., None] + kind.zero_point).flatten(1).to(torch.uint8)
    return TypedMatrix(stored, d * sign, sub_scale=one if kind.groups > 1 else None)


def _holds(kind: GridType, largest: int, zero: int) -> bool:
    """Return whether a type holds the numbers ``-zero .. largest - zero`` times a scale."""
    if kind.zero_point is None:
        return kind.groups > 1 and largest <= kind.largest
    return _fits(kind, largest, zero) or _fits(kind, largest, largest - zero)


def _fits(kind: GridType, largest: int, zero: int) -> bool:
    """Return whether a type with a fixed zero point holds ``-zero .. largest - zero`` as integers."""
    middle = kind.zero_point or 0
    return zero <= middle and largest - zero <= kind.largest - middle
