"""Compute how many bits a weight takes, and how large a packed model is."""

import math
from collections.abc import Callable, Mapping, Sequence

SCALE_BITS = 16
"""Scales are stored in float16; a zero point takes as many bits as a weight."""
FACTOR_BITS = {2: 4, 6: 8}
"""Bits of the small factors of GGUF's block types by the bits of a weight; elsewhere 6."""
KINDS = ("integers", "scale", "d", "d_min", "sub_scale", "sub_min")
"""Kinds of tensors that a packed model needs; a zero point counts with its scale."""


def projection_weights(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the number of quantized weights.

    Args:
        shapes: Shapes of the tensors in block files; names that end in ``integers`` count.
    """
    return sum(math.prod(shape) for name, shape in shapes.items() if name.endswith(".integers"))


def bits_per_weight(shapes: Mapping[str, Sequence[int]], bits: Callable[[int, str], int]) -> float:
    """Return the mean of the bits that quantized weights take, with their share of scales and zero points.

    Args:
        shapes: Shapes of the tensors in block files by ``BLOCK.PROJECTION.KIND``; at least one kind is
            ``integers``.
        bits: Bits of an integer of a projection, given its block and its name.
    """
    total = 0
    for name, shape in shapes.items():
        block, projection, kind = name.split(".")[0], name.split(".")[1], name.split(".")[-1]
        if kind not in KINDS:
            continue
        own = bits(int(block), projection)
        factor = FACTOR_BITS.get(own, 6)
        each = {"integers": own, "scale": SCALE_BITS + own, "sub_scale": factor, "sub_min": factor}
        total += math.prod(shape) * each.get(kind, SCALE_BITS)
    return total / projection_weights(shapes)


def packed_bytes(original: int, weights: int, original_bits: int, packed_bits: float) -> int:
    """Return the size of a model whose quantized weights are packed and whose others stay.

    Args:
        original: Bytes of the original model.
        weights: Number of quantized weights.
        original_bits: Bits of such a weight in the original.
        packed_bits: Bits of such a weight once packed, from ``bits_per_weight``.
    """
    return round(original - weights * (original_bits - packed_bits) / 8)
