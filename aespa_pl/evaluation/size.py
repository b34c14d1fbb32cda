"""Compute how many bits a weight takes, and how large a packed model is."""

import math
from collections.abc import Mapping, Sequence

SCALE_BITS = 16
"""Scales are stored in float16; a zero point takes as many bits as a weight."""


def projection_weights(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the number of quantized weights.

    Args:
        shapes: Shapes of the tensors in block files; names that end in ``integers`` count.
    """
    return sum(math.prod(shape) for name, shape in shapes.items() if name.endswith(".integers"))


def bits_per_weight(shapes: Mapping[str, Sequence[int]], bits: int) -> float:
    """Return the bits that a quantized weight takes, with its share of scales and zero points.

    Args:
        shapes: Shapes of the tensors in block files; at least one name ends in ``integers``.
        bits: Bits of an integer.
    """
    pairs = sum(math.prod(shape) for name, shape in shapes.items() if name.endswith(".scale"))
    return bits + pairs * (SCALE_BITS + bits) / projection_weights(shapes)


def packed_bytes(original: int, weights: int, original_bits: int, packed_bits: float) -> int:
    """Return the size of a model whose quantized weights are packed and whose others stay.

    Args:
        original: Bytes of the original model.
        weights: Number of quantized weights.
        original_bits: Bits of such a weight in the original.
        packed_bits: Bits of such a weight once packed, from ``bits_per_weight``.
    """
    return round(original - weights * (original_bits - packed_bits) / 8)
