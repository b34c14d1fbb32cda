"""Tell which block type each matrix of a model gets in one of llama.cpp's mixtures, such as Q4_K_M.

A mixture is a type for most matrices and larger ones for those that suffer most. Rows that are no whole
blocks of the type take one of 32 columns. In place of Q2_K and Q3_K llama.cpp then stores Q4_0; we store
IQ4_NL, which is as large and loses less.

Source: ``llama-quant.cpp`` of llama.cpp v0.5.0 with an importance matrix; the tests compare with its files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from aespa_pl.algorithm.grid_types import TYPES
from aespa_pl.models.family import PER_LAYER, BlockLayout, Projection, Role

MIXTURES = {
    "Q2_K_S": "Q2_K", "Q2_K": "Q2_K", "Q3_K_S": "Q3_K", "Q3_K_M": "Q3_K", "Q3_K_L": "Q3_K",
    "Q4_K_S": "Q4_K", "Q4_K_M": "Q4_K", "Q5_K_S": "Q5_K", "Q5_K_M": "Q5_K", "Q6_K": "Q6_K",
    "IQ4_XS": "IQ4_XS", "IQ4_NL": "IQ4_NL",
    "Q4_0": "Q4_0", "Q4_1": "Q4_1", "Q5_0": "Q5_0", "Q5_1": "Q5_1", "Q8_0": "Q8_0",
}  # fmt: skip
"""The type of most matrices, by the name of the mixture. Of two meanings of a name (Q2_K) it is llama.cpp's
file: the mixture."""
FILE_TYPES = {
    "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12,
    "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "Q2_K_S": 21,
    "IQ4_NL": 25, "IQ4_XS": 30,
}  # fmt: skip
"""Numbers of the mixtures in ``llama_ftype``."""
NARROW = {
    "Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
    "Q2_0": "Q4_0",
}  # fmt: skip
"""The types of 32 columns, for rows that are no multiple of a larger block."""
MANY_QUERIES = 4
"""Query heads for each key/value head from which on values are small enough for a larger type."""
FEW_EXPERTS = 8
"""Experts of the models whose attention is small beside them, so that it gets larger types."""
FEW_EXPERTS_LARGER = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_XS", "IQ4_NL")
"""Mixtures in which the attention's output has Q5_K then."""
LARGE = 80
"""Blocks of the models with 70 billion weights, whose values get a larger type."""
LARGE_KINDS = ("llama", "qwen2")
COUNTED = ("lfm2", "lfm2moe", "granitehybrid")
"""Architectures whose files have the number of key/value heads of each block, 0 where it has no attention."""


class Matrix(StrEnum):
    """Names what a mixture tells apart."""

    EMBEDDING = "embedding"
    HEAD = "head"
    VALUE = "value, or query, key and value in one"
    KEY = "key"
    ATTENTION_OUTPUT = "attention output"
    DOWN = "last matrix of the MLP"
    OTHER = "other"


@dataclass(frozen=True)
class MixtureModel:
    """Holds what a mixture depends on."""

    blocks: int
    queries: int
    """Query heads for each key/value head, as llama.cpp reads it off the first block."""
    large: bool
    """Whether llama.cpp knows it as one of 70 billion weights."""
    experts: int = 0
    """Experts of a block that has some."""
    values: tuple[int, ...] = ()
    """Blocks with values, which are counted by themselves; empty: all."""

    @classmethod
    def of(cls, layouts: Sequence[BlockLayout], architecture: str) -> "MixtureModel":
        """Read it off the layouts of all blocks; the architecture is llama.cpp's."""
        layout, blocks = layouts[0], len(layouts)
        kinds = [{matrix_of(each, p) for p in each.projections} for each in layouts]
        values = tuple(i for i, of_block in enumerate(kinds) if Matrix.VALUE in of_block)
        queries = layout.heads // layout.key_value_heads
        if architecture in COUNTED and 0 not in values:
            queries = 0
        plain = architecture == LARGE_KINDS[0] and queries == 1
        large = architecture in LARGE_KINDS and blocks == LARGE and not plain
        experts = max(0 if each.mixture is None else each.mixture.count for each in layouts)
        return cls(blocks, queries, large, experts, values)


def matrix_of(layout: BlockLayout, projection: Projection) -> Matrix:
    """Return what a projection is to a mixture."""
    if any(p.role is Role.VALUE for p in layout.projections if p.module == projection.module):
        has_keys = any(p.role is Role.KEY for p in layout.groups[0].projections)
        return Matrix.VALUE if has_keys else Matrix.KEY  # one matrix for both has the name of keys
    if projection.role is Role.KEY:
        return Matrix.KEY
    where = next(group.name for group in layout.groups if projection in group.projections)
    attends = layout.latent or layout.attended_group is not None
    if where == "attention_output" and attends:
        return Matrix.ATTENTION_OUTPUT
    if where in ("attention_input", "attention_output") and not attends:  # of linear attention
        first, *others = layout.groups[0].projections
        return Matrix.VALUE if others and projection == first else Matrix.OTHER
    return Matrix.OTHER if where in PER_LAYER or projection.residual is None else Matrix.DOWN


def mixture_type(
    name: str, matrix: Matrix, columns: int, model: MixtureModel, block: int = 0, *, tied: bool = False
) -> str:
    """Return the name of the type that a matrix with rows of so many columns gets.

    The name is a mixture's; or a type's that is none, which all matrices get. Blocks have numbers from 0. An
    embedding may be ``tied``: it is the head as well.
    """
    kind = MIXTURES.get(name, name)
    if name in MIXTURES:
        if matrix is Matrix.HEAD or (matrix is Matrix.EMBEDDING and tied):
            kind = "Q8_0" if kind == "Q8_0" or not TYPES[kind].fits(columns) else "Q6_K"
        else:
            kind = _larger(name, matrix, block, model) or kind
    # where a row is no whole number of the type's blocks, another stands in for it
    return kind if TYPES[kind].fits(columns) else NARROW.get(kind, kind)


def _larger(name: str, matrix: Matrix, block: int, model: MixtureModel) -> str | None:
    """Return the type of a matrix that a mixture makes larger, else None."""
    n = model.blocks
    if matrix is Matrix.VALUE and model.values:
        block, n = model.values.index(block), len(model.values)
    first_eighth = block < n // 8
    often = first_eighth or block >= 7 * n // 8 or (block - n // 8) % 3 == 2
    many_queries = model.queries >= MANY_QUERIES
    rules: dict[str, tuple[str | None, str | None, str | None]] = {  # of value, down, attention output
        "Q2_K_S": ("Q4_K" if many_queries else None, "Q4_K" if first_eighth else None, None),
        "Q2_K": ("Q4_K" if many_queries else "Q3_K", "Q3_K", "Q3_K"),
        "Q3_K_M": ("Q5_K" if block < 2 else "Q4_K", "Q5_K" if block < n // 16 else "Q4_K", "Q4_K"),
        "Q3_K_L": ("Q5_K", "Q5_K", "Q5_K"),
        "Q4_K_S": ("Q5_K" if block < 4 else None, "Q5_K" if first_eighth else None, None),
        "Q4_K_M": ("Q6_K" if often else None, "Q6_K" if often else None, None),
        "Q5_K_M": ("Q6_K" if often else None, "Q6_K" if often else None, None),
        "IQ4_XS": ("Q5_K" if many_queries else None, None, None),
        "IQ4_NL": ("Q5_K" if many_queries else None, None, None),
        "Q4_0": (None, "Q4_1" if first_eighth else None, None),
        "Q5_0": (None, "Q5_1" if first_eighth else None, None),
    }
    if model.experts == FEW_EXPERTS and matrix in (Matrix.VALUE, Matrix.KEY):
        return "Q8_0"
    if model.experts == FEW_EXPERTS and matrix is Matrix.ATTENTION_OUTPUT:
        return "Q5_K" if name in FEW_EXPERTS_LARGER else None
    ruled = (Matrix.VALUE, Matrix.DOWN, Matrix.ATTENTION_OUTPUT)
    found = rules[name][ruled.index(matrix)] if name in rules and matrix in ruled else None
    small = (found or MIXTURES[name]) in ("Q3_K", "Q4_K")
    return "Q5_K" if matrix is Matrix.VALUE and model.large and small else found
