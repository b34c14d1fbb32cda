"""Compute how many bits a weight takes, and how large a packed model is."""

import math
from collections.abc import Callable, Mapping, Sequence

SCALE_BITS = 16
"""Scales are stored in float16; a zero point, which symmetric grids don't have, takes a weight's bits."""
FACTOR_BITS = {2: 4, 6: 8}
"""Bits of the small factors of GGUF's block types by the bits of a weight; elsewhere 6."""
KINDS = ("integers", "scale", "d", "d_min", "sub_scale", "sub_min")
"""Kinds of tensors that a packed model needs; a zero point counts with its scale."""


def projection_weights(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the number of quantized weights, from the shapes of the tensors in block files."""
    return sum(math.prod(shape) for name, shape in shapes.items() if name.endswith(".integers"))


def scale_bits(bits: int, *, symmetric: bool) -> int:
    """Return the bits that scale and zero point of a group of weights take."""
    return SCALE_BITS + (0 if symmetric else bits)


def packed_bits(
    shapes: Mapping[str, Sequence[int]], bits: Callable[[str], int], *, symmetric: bool = False
) -> float:
    """Return the bits that quantized matrices take, with their scales and zero points.

    ``shapes`` are those of their stored tensors by ``MATRIX.KIND``; ``bits`` returns a matrix's by its name.
    """
    total = 0
    for name, shape in shapes.items():
        matrix, _, kind = name.rpartition(".")
        if kind in KINDS:
            own = bits(matrix)
            factor = FACTOR_BITS.get(own, 6)
            scale = scale_bits(own, symmetric=symmetric)
            each = {"integers": own, "scale": scale, "sub_scale": factor, "sub_min": factor}
            total += math.prod(shape) * each.get(kind, SCALE_BITS)
    return total


def bits_per_weight(
    shapes: Mapping[str, Sequence[int]], bits: Callable[[int, str], int], *, symmetric: bool = False
) -> float:
    """Return the mean bits of a quantized projection's weight, with its part of scales and zero points.

    ``shapes`` are those of the tensors in block files by ``BLOCK.PROJECTION.KIND``; ``bits`` returns the bits
    of an integer, given block and projection.
    """

    def of_matrix(name: str) -> int:
        block, _, projection = name.partition(".")
        return bits(int(block), projection)

    return packed_bits(shapes, of_matrix, symmetric=symmetric) / projection_weights(shapes)
