"""List the matrices of a model with their candidates: block types of llama.cpp, or bits of uniform grids."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aespa_pl.algorithm.grid_types import TYPES
from aespa_pl.algorithm.quantizer import GridFormat
from aespa_pl.evaluation.size import SCALE_BITS
from aespa_pl.export.gguf import padded
from aespa_pl.export.gguf_bytes import BLOCK_TYPES
from aespa_pl.models.family import BlockLayout, Projection
from aespa_pl.planning.shape import Shape
from aespa_pl.settings import QuantizationSettings

WIDE = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
NARROW = ("Q2_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Candidates for rows that are whole blocks of 256 columns, and for others."""
BITS = tuple(str(bits) for bits in range(2, 9))
ENDS = ("embedding", "head")


@dataclass(frozen=True)
class SizedMatrix:
    """Holds a matrix of the file and the bytes that it has in each candidate."""

    keys: tuple[str, ...]
    """``BLOCK.PROJECTION`` of all projections in it, ``embedding`` or ``head``."""
    weights: int
    costs: Mapping[str, int]
    """Bytes by candidate: the name of a block type, or bits."""


def typed_matrices(
    layouts: tuple[BlockLayout, ...],
    shape: Shape,
    fixed: Mapping[str, str],
    *,
    tied: bool,
    candidates: Callable[[int], tuple[str, ...]] | None = None,
) -> list[SizedMatrix]:
    """Return every matrix with the block types that hold its rows.

    Args:
        layouts: Layout of each block.
        shape: Shape of the model.
        fixed: Types that the user has chosen, by the keys of ``SizedMatrix``.
        tied: Whether the head is the embedding.
        candidates: Returns the types for a row of so many columns; None: those that hold whole rows.
    """
    of_width = candidates or fitting_types

    def sized(keys: tuple[str, ...], rows: int, columns: int) -> SizedMatrix:
        types = (fixed[keys[0]],) if keys[0] in fixed else of_width(columns)
        costs = {k: padded(int(rows * columns * BLOCK_TYPES[k].bits / 8)) for k in types}
        return SizedMatrix(keys, rows * columns, costs)

    ends = ENDS[:1] if tied else ENDS
    found = [sized((end,), shape.vocabulary, shape.hidden) for end in ends]
    return found + [sized(*each) for each in _in_blocks(layouts, shape)]


def uniform_matrices(
    layouts: tuple[BlockLayout, ...], shape: Shape, settings: QuantizationSettings, fixed: Mapping[str, str]
) -> list[SizedMatrix]:
    """Return the matrices of the blocks with each number of bits; arguments as above."""

    def sized(keys: tuple[str, ...], rows: int, columns: int) -> SizedMatrix:
        grids = rows * columns // (settings.group_size or columns)
        bits = (fixed[keys[0]],) if keys[0] in fixed else BITS
        costs = {b: (rows * columns * int(b) + grids * (SCALE_BITS + int(b)) + 7) // 8 for b in bits}
        return SizedMatrix(keys, rows * columns, costs)

    return [sized(*each) for each in _in_blocks(layouts, shape)]


def fitting_types(columns: int) -> tuple[str, ...]:
    """Return the block types for a row of so many columns, of which each is a candidate."""
    types = WIDE if TYPES[WIDE[0]].fits(columns) else NARROW
    return tuple(kind for kind in types if TYPES[kind].fits(columns))


def form_of(candidate: str, settings: QuantizationSettings) -> GridFormat:
    """Return the grids of a candidate."""
    if candidate in TYPES:
        return GridFormat.of(TYPES[candidate])
    return GridFormat(int(candidate), settings.symmetric, settings.group_size)


def _in_blocks(layouts: tuple[BlockLayout, ...], shape: Shape) -> list[tuple[tuple[str, ...], int, int]]:
    """Return keys, rows and columns of the matrices of all blocks; all experts of one have the same."""
    found = []
    for block, layout in enumerate(layouts):
        of_module: dict[str, list[str]] = {}
        for p in layout.projections:
            of_module.setdefault(_matrix_of(p, layout), []).append(p.name)
        for names in of_module.values():
            each = [shape.of_blocks[block][name] for name in names]
            keys = tuple(f"{block}.{name}" for name in names)
            found.append((keys, sum(m.rows for m in each), each[0].columns))
    return found


def _matrix_of(projection: Projection, layout: BlockLayout) -> str:
    """Return what projections with one candidate share: their module; of experts the name in theirs."""
    mixture = layout.mixture
    if mixture is not None and projection.module.startswith(f"{mixture.experts}."):
        return projection.module.rpartition(".")[2]
    return projection.module
