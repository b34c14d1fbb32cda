"""Encode matrices in the block types of GGUF that hold ``scale * (q - z)`` exactly, and their bytes.

A block is 32 or 256 columns of one row. The types of 32 store ``v = q - z`` plus an offset beside
one float16 scale. The types of 256 (k-quants) compute ``d * sc * q - dmin * m``: with d = dmin = scale,
sc = 1 and m = z that is the same number. Q4_1 and Q5_1 store ``scale * z`` rounded to float16, which
is not.

Source: ``ggml-quants.h`` and ``dequantize_row_*`` in ``ggml-quants.c`` of llama.cpp.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from aespa_pl.export.quantized import QuantizedMatrix

Bytes = npt.NDArray[Any]
Integers = npt.NDArray[Any]
"""Type of stored bytes and integers, both uint8; numpy's types of ``&`` and ``>>`` with a Python
integer say less."""


@dataclass(frozen=True)
class BlockType:
    """Describes one block type, and the integers that it holds."""

    type: GGMLQuantizationType
    file_type: LlamaFileType
    """Name of a file whose matrices are mostly of this type."""
    largest_integer: int | None
    """The largest q, where a type stores q and z; None where it stores q - z."""
    offset: int
    """Number that is added to q - z, where a type stores that."""
    pack: Callable[[Integers, Integers, Bytes], Bytes]
    """Makes the bytes ``[rows, blocks, size]`` of stored values ``[rows, blocks, columns]``, zero points
    ``[rows, blocks]`` and the scales' bytes ``[rows, blocks, 2]``."""

    @property
    def columns(self) -> int:
        """Return the number of columns of a block."""
        return int(GGML_QUANT_SIZES[self.type][0])

    @property
    def bits(self) -> float:
        """Return the bits of the file for each weight, with its part of scale and zero point."""
        columns, size = GGML_QUANT_SIZES[self.type]
        return 8 * size / columns

    @property
    def words(self) -> str:
        """Return the name of the type with its bits, for messages."""
        return f"{self.type.name} ({self.bits:g} bits a weight)"

    def holds(self, bits: int, *, symmetric: bool) -> bool:
        """Return whether every integer of a grid fits."""
        largest = int(2**bits - 1)
        if self.largest_integer is not None:
            return largest <= self.largest_integer
        lowest, highest = (-(largest // 2) - 1, largest // 2) if symmetric else (-largest, largest)
        return -self.offset <= lowest and highest < self.offset

    def fits(self, columns: int, group_size: int | None) -> bool:
        """Return whether the columns of a row, and of a group, are whole blocks."""
        return columns % self.columns == 0 and (group_size or columns) % self.columns == 0

    def encode(self, matrix: QuantizedMatrix) -> Bytes:
        """Return the bytes ``[rows, bytes of a row]`` of a matrix."""
        blocks = matrix.group_size // self.columns
        scale, zero = (
            np.repeat(value.numpy(), blocks, 1) for value in (matrix.scale, matrix.zero_point)
        )
        q = matrix.integers.numpy().reshape(*scale.shape, self.columns)
        if self.largest_integer is None:
            q = (q.astype(np.int16) - zero[..., None] + self.offset).astype(np.uint8)
        scale_bytes = scale[..., None].astype("<f2").view(np.uint8)
        return self.pack(q, zero, scale_bytes).reshape(len(q), -1)


def _nibbles(values: Integers) -> Bytes:
    """Put the second half of the columns into the high nibbles of the first half's bytes."""
    low, high = np.split(values, 2, axis=-1)
    packed: Bytes = low | (high << 4)
    return packed


def _pack_q4_0(values: Integers, _zero: Integers, scale: Bytes) -> Bytes:
    return np.concatenate([scale, _nibbles(values)], -1)


def _pack_q5_0(values: Integers, _zero: Integers, scale: Bytes) -> Bytes:
    fifth_bits = np.packbits(values >> 4, axis=-1, bitorder="little")
    return np.concatenate([scale, fifth_bits, _nibbles(values & 15)], -1)


def _pack_q8_0(values: Integers, _zero: Integers, scale: Bytes) -> Bytes:
    return np.concatenate([scale, values - np.uint8(128)], -1)  # two's complement


def _pack_q2_k(values: Integers, zero: Integers, scale: Bytes) -> Bytes:
    # 16 bytes, one for each 16 columns: sc in the low nibble, m in the high one
    factors = np.repeat((1 | (zero << 4))[..., None], 16, -1)
    quarters = values.reshape(*zero.shape, 2, 4, 32)  # of each 128 columns
    bits = np.bitwise_or.reduce(quarters << (2 * np.arange(4, dtype=np.uint8)[:, None]), axis=-2)
    return np.concatenate([factors, bits.reshape(*zero.shape, 64), scale, scale], -1)


def _pack_q4_k(values: Integers, zero: Integers, scale: Bytes) -> Bytes:
    # eight pairs (sc, m) of 6 bits in 12 bytes: sc of the first four, m of the first four, and the
    # low nibbles of sc and m of the last four; z < 16 has no higher bits
    one = np.ones_like(zero)
    factors = np.repeat(np.stack([one, zero, 1 | (zero << 4)], -1), 4, -1)
    halves = values.reshape(*zero.shape, 4, 64)  # of 32 columns, low and high nibbles
    return np.concatenate([scale, scale, factors, _nibbles(halves).reshape(*zero.shape, 128)], -1)


_Q, _F = GGMLQuantizationType, LlamaFileType
BLOCK_TYPES = (
    BlockType(_Q.Q2_K, _F.MOSTLY_Q2_K, 3, 0, _pack_q2_k),
    BlockType(_Q.Q4_K, _F.MOSTLY_Q4_K_S, 15, 0, _pack_q4_k),
    BlockType(_Q.Q4_0, _F.MOSTLY_Q4_0, None, 8, _pack_q4_0),
    BlockType(_Q.Q5_0, _F.MOSTLY_Q5_0, None, 16, _pack_q5_0),
    BlockType(_Q.Q8_0, _F.MOSTLY_Q8_0, None, 128, _pack_q8_0),
)
"""Block types from the fewest bits a weight (2.625, 4.5, 4.5, 5.5, 8.5) to the most."""


def smallest_type(
    bits: int, columns: int, group_size: int | None, *, symmetric: bool
) -> BlockType | None:
    """Return the smallest type that holds a matrix exactly, None if there is none."""
    fitting = (
        kind
        for kind in BLOCK_TYPES
        if kind.holds(bits, symmetric=symmetric) and kind.fits(columns, group_size)
    )
    return next(fitting, None)
