"""Choose the block type of GGUF that holds a matrix, and encode its numbers as the bytes of the type.

A type with minimums and sub-scales computes ``d a q - d_min c``: with d = d_min = scale, a = 1 and c = z that
is ``scale * (q - z)``. A type with a fixed zero point p stores ``q - z + p``; where that does not fit, the
negative scale and ``z - q + p`` may: so Q2_0, whose p is 1, holds 2 bits with the zero points 1 and 2. Q4_1
and Q5_1 are not exact, because they store ``scale * z`` rounded to float16.

Source: ``ggml-common.h`` and ``dequantize_row_*`` in ``ggml-quants.c`` of llama.cpp v0.5.0.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aespa_pl.algorithm.grid_types import LEVELS, TYPES, GridType, TypedWeight
from aespa_pl.algorithm.quantizer import QuantizedWeight

Bytes = npt.NDArray[Any]
"""Stored bytes and integers, both uint8; numpy's types of ``&`` and ``>>`` with a Python integer say less."""
ALIGNMENT = 32
"""Bytes that each tensor of a file is padded to a multiple of."""


def padded(size: int) -> int:
    """Return the bytes that a part of a file takes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Parts:
    """Holds the numbers of a matrix, cut into blocks; those that the type has none of are empty."""

    integers: Bytes  # [rows, blocks, columns]
    d: Bytes  # [rows, blocks]
    d_min: Bytes
    sub_scale: Bytes  # [rows, blocks, groups]
    sub_min: Bytes


@dataclass(frozen=True)
class BlockType:
    """Describes a block type: its numbers in llama.cpp, its size, and how it is packed."""

    grid: GridType
    number: int
    """Number in ``ggml_type``."""
    file_type: int
    """Number in ``llama_ftype`` of a file whose matrices are mostly of this type."""
    size: int
    """Bytes of a block."""
    pack: Callable[[Parts], list[Bytes]]
    """Returns the pieces ``[rows, blocks, bytes]`` of each block in their order."""

    @property
    def name(self) -> str:
        """Return the name of the type in llama.cpp."""
        return self.grid.name

    @property
    def bits(self) -> float:
        """Return the bits of the file for each weight, with its part of the scales."""
        return 8 * self.size / self.grid.block

    def encode(self, matrix: TypedWeight) -> Bytes:
        """Return the bytes ``[rows, bytes of a row]`` of a matrix, whose rows are whole blocks."""
        none = torch.empty(0)
        d_min = none if matrix.d_min is None else matrix.d_min
        factors = (
            none if value is None else value.unflatten(1, (-1, self.grid.groups))
            for value in (matrix.sub_scale, matrix.sub_min)
        )
        integers = matrix.integers.unflatten(1, (-1, self.grid.block))
        parts = (value.numpy() for value in (integers, matrix.d, d_min, *factors))
        pieces = self.pack(Parts(*parts))
        return np.concatenate(pieces, -1).reshape(len(integers), -1)


def _half(value: Bytes) -> Bytes:
    """Return the two bytes of a float16 for each block."""
    return value[..., None].astype("<f2").view(np.uint8)


def _nibbles(values: Bytes) -> Bytes:
    """Put the second half of the columns into the high nibbles of the first half's bytes."""
    low, high = np.split(values, 2, axis=-1)
    return np.asarray(low | (high << 4))


def _spread(values: Bytes, bits: int) -> Bytes:
    """Join ``[..., fields, bytes]`` into ``[..., bytes]``: field i takes the bits from ``bits * i`` on."""
    shifts = bits * np.arange(values.shape[-2], dtype=np.uint8)[:, None]
    return np.asarray(np.bitwise_or.reduce(values << shifts, axis=-2))


def _cut(values: Bytes, *shape: int) -> Bytes:
    return values.reshape(*values.shape[:2], *shape)


def _q5_0(p: Parts) -> list[Bytes]:
    fifth_bits = np.packbits(p.integers >> 4, axis=-1, bitorder="little")
    return [_half(p.d), fifth_bits, _nibbles(p.integers & 15)]


def _q5_1(p: Parts) -> list[Bytes]:
    d, *integers = _q5_0(p)
    return [d, _half(-p.d_min), *integers]


def _quarters(values: Bytes) -> Bytes:
    """Pack 2 bits of each of 256 values: of each 128 columns, those at distance 32 share a byte."""
    return _cut(_spread(_cut(values, 2, 4, 32), 2), 64)


def _q3_k(p: Parts) -> list[Bytes]:
    factors = (p.sub_scale + 32).astype(np.uint8)
    # low nibbles of factor i and i + 8 share a byte, then the high pairs of bits of i, i + 4, i + 8, i + 12
    low, high = _nibbles(factors & 15), _spread(_cut(factors >> 4, 4, 4), 2)
    third_bits = _spread(_cut(p.integers >> 2, 8, 32), 1)
    return [third_bits, _quarters(p.integers & 3), low, high, _half(p.d)]


def _factor_pairs(p: Parts) -> Bytes:
    """Pack eight pairs of 6 bits in 12 bytes.

    Factors of the first four have a byte each; the others two free bits of it, and a nibble of the last four.
    """
    (s, s_last), (m, m_last) = (np.split(factors, 2, -1) for factors in (p.sub_scale, p.sub_min))
    last = (s_last & 15) | ((m_last & 15) << 4)
    return np.concatenate([s | ((s_last >> 4) << 6), m | ((m_last >> 4) << 6), last], -1)


def _q4_k(p: Parts) -> list[Bytes]:
    integers = _cut(_nibbles(_cut(p.integers, 4, 64)), 128)  # columns at distance 32 share a byte
    return [_half(p.d), _half(p.d_min), _factor_pairs(p), integers]


def _q5_k(p: Parts) -> list[Bytes]:
    fifth_bits = _spread(_cut(p.integers >> 4, 8, 32), 1)
    d, d_min, factors, low = _q4_k(replace(p, integers=p.integers & 15))
    return [d, d_min, factors, fifth_bits, low]


def _q6_k(p: Parts) -> list[Bytes]:
    low = _cut(_nibbles(_cut(p.integers & 15, 2, 128)), 128)
    high = _cut(_spread(_cut(p.integers >> 4, 2, 4, 32), 2), 64)
    return [low, high, p.sub_scale.astype(np.int8).view(np.uint8), _half(p.d)]


def _q2_0(p: Parts) -> list[Bytes]:
    return [_half(p.d), _spread(np.swapaxes(_cut(p.integers, 16, 4), -1, -2), 2)]


def _q2_k(p: Parts) -> list[Bytes]:
    return [p.sub_scale | (p.sub_min << 4), _quarters(p.integers), _half(p.d), _half(p.d_min)]


def _numbers(levels: Bytes) -> Bytes:
    """Return the number of each level."""
    return np.searchsorted(LEVELS, levels).astype(np.uint8)


def _iq4_nl(p: Parts) -> list[Bytes]:
    return [_half(p.d), _nibbles(_numbers(p.integers))]


def _iq4_xs(p: Parts) -> list[Bytes]:
    factors = (p.sub_scale + 32).astype(np.uint8)  # eight, of 6 bits
    high = np.bitwise_or.reduce((factors >> 4).astype("<u2") << (2 * np.arange(8, dtype="<u2")), axis=-1)
    low = _spread(np.swapaxes(_cut(factors & 15, 4, 2), -1, -2), 4)
    integers = _cut(_nibbles(_cut(_numbers(p.integers), 8, 32)), 128)  # columns at distance 16 share a byte
    return [_half(p.d), high[..., None].view(np.uint8), low, integers]


BLOCK_TYPES = {
    kind.name: kind
    for kind in (
        BlockType(TYPES["Q2_0"], 42, 41, 18, _q2_0),
        BlockType(TYPES["Q2_K"], 10, 10, 84, _q2_k),
        BlockType(TYPES["Q3_K"], 11, 11, 110, _q3_k),
        BlockType(TYPES["IQ4_XS"], 23, 30, 136, _iq4_xs),
        BlockType(TYPES["Q4_K"], 12, 14, 144, _q4_k),
        BlockType(TYPES["Q4_0"], 2, 2, 18, lambda p: [_half(p.d), _nibbles(p.integers)]),
        BlockType(TYPES["IQ4_NL"], 20, 25, 18, _iq4_nl),
        BlockType(TYPES["Q4_1"], 3, 3, 20, lambda p: [_half(p.d), _half(-p.d_min), _nibbles(p.integers)]),
        BlockType(TYPES["Q5_K"], 13, 16, 176, _q5_k),
        BlockType(TYPES["Q5_0"], 6, 8, 22, _q5_0),
        BlockType(TYPES["Q5_1"], 7, 9, 24, _q5_1),
        BlockType(TYPES["Q6_K"], 14, 18, 210, _q6_k),
        # two's complement
        BlockType(TYPES["Q8_0"], 8, 7, 34, lambda p: [_half(p.d), p.integers - np.uint8(128)]),
    )
}
"""Block types from the fewest bits a weight to the most (llama.cpp v0.5.0)."""


def zero_points(bits: int, *, symmetric: bool) -> Collection[int]:
    """Return the zero points that a grid may have."""
    return {2 ** (bits - 1)} if symmetric else range(2**bits)


def smallest_type(
    bits: int, columns: int, group_size: int | None, zeros: Collection[int]
) -> BlockType | None:
    """Return the smallest type that holds a matrix with these zero points exactly, None if there is none."""
    for kind in BLOCK_TYPES.values():
        whole = columns % kind.grid.block == 0 and (group_size or columns) % kind.grid.block == 0
        if whole and all(_holds(kind.grid, 2**bits - 1, zero) for zero in zeros):
            return kind
    return None


def as_typed(kind: GridType, matrix: QuantizedWeight) -> TypedWeight:
    """Return a matrix, which a type holds exactly, as that type stores it."""
    blocks, bits = matrix.group_size // kind.block, matrix.bits
    d, zero = (x.repeat_interleave(blocks, 1) for x in (matrix.scale.half(), matrix.zero_point))
    one = torch.ones(len(d), d.shape[1] * kind.groups, dtype=torch.uint8)
    if kind.zero_point is None:
        offset = zero.repeat_interleave(kind.groups, 1)
        return TypedWeight(matrix.integers, d, d, one, offset, kind=kind)
    direct = torch.tensor([_fits(kind, 2**bits - 1, z) for z in range(2**bits)])
    sign = torch.where(direct[zero.int()], 1, -1)  # [rows, blocks]
    steps = matrix.integers.unflatten(1, (-1, kind.block)).int() - zero[..., None].int()
    stored = (steps * sign[..., None] + kind.zero_point).flatten(1).to(torch.uint8)
    return TypedWeight(stored, d * sign, sub_scale=one if kind.groups > 1 else None, kind=kind)


def _holds(kind: GridType, largest: int, zero: int) -> bool:
    """Return whether a type holds the numbers ``-zero .. largest - zero`` times a scale."""
    if kind.levels is not None:
        return False
    if kind.zero_point is None:
        return kind.groups > 1 and largest <= kind.largest
    return _fits(kind, largest, zero) or _fits(kind, largest, largest - zero)


def _fits(kind: GridType, largest: int, zero: int) -> bool:
    """Return whether a type with a fixed zero point holds ``-zero .. largest - zero`` as integers."""
    middle = kind.zero_point or 0
    return zero <= middle and largest - zero <= kind.largest - middle
