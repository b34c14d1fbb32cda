"""Read the values of the tensors of a GGUF file, those of a type that the library gguf does not know too."""

from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from aespa_pl.export.gguf_bytes import BLOCK_TYPES

Q2_0 = BLOCK_TYPES["Q2_0"]
"""A block type that version 0.19 of the library gguf does not know."""


def dequantized(data: npt.NDArray[Any], kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """Return the float32 values of a tensor of a GGUF file."""
    if int(kind) != Q2_0.number:
        return np.asarray(dequantize(data, kind), np.float32)
    blocks = data.reshape(*data.shape[:-1], -1, Q2_0.size)
    d = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float32)
    integers = (blocks[..., 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3
    steps = integers.reshape(*blocks.shape[:-1], -1).astype(np.float32) - 1
    values: npt.NDArray[np.float32] = (d * steps).reshape(*data.shape[:-1], -1)
    return values


def _unknown(cls: type[GGMLQuantizationType], number: object) -> GGMLQuantizationType | None:
    """Make the value that the enumeration lacks, as ``enum`` documents it for ``_missing_``."""
    if number != Q2_0.number:
        return None
    made = int.__new__(cls, Q2_0.number)
    made._name_, made._value_ = Q2_0.name, Q2_0.number
    return made


if Q2_0.number not in set(GGMLQuantizationType):
    GGMLQuantizationType._missing_ = classmethod(_unknown)  # type: ignore[assignment,method-assign]
    GGML_QUANT_SIZES[GGMLQuantizationType(Q2_0.number)] = (Q2_0.grid.block, Q2_0.size)
