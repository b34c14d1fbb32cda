"""Tell which block type each matrix of a model gets in one of llama.cpp's mixtures, such as Q4_K_M.

A mixture is a type for most matrices and larger ones for those that suffer most. Rows that are no whole
blocks of the type take one of 32 columns. llama.cpp then stores IQ4_NL in place of Q2_K and Q3_K; we store
Q4_0, which is as large and has a grid.

Source: ``llama-quant.cpp`` of llama.cpp v0.5.0 with an importance matrix; the tests compare with its files.
"""

from dataclasses import dataclass
from enum import StrEnum

from transformers import PreTrainedConfig

from aespa_pl.algorithm.grid_types import TYPES
from aespa_pl.models.family import BlockLayout, Projection, Role

MIXTURES = {
    "Q2_K_S": "Q2_K", "Q2_K": "Q2_K", "Q3_K_S": "Q3_K", "Q3_K_M": "Q3_K", "Q3_K_L": "Q3_K",
    "Q4_K_S": "Q4_K", "Q4_K_M": "Q4_K", "Q5_K_S": "Q5_K", "Q5_K_M": "Q5_K", "Q6_K": "Q6_K",
    "Q4_0": "Q4_0", "Q4_1": "Q4_1", "Q5_0": "Q5_0", "Q5_1": "Q5_1", "Q8_0": "Q8_0",
}  # fmt: skip
"""The type of most matrices, by the name of the mixture. Of two meanings of a name (Q2_K) it is llama.cpp's
file: the mixture."""
FILE_TYPES = {
    "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12,
    "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "Q2_K_S": 21,
}  # fmt: skip
"""Numbers of the mixtures in ``llama_ftype``."""
NARROW = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "Q2_0": "Q4_0"}
"""The types of 32 columns, for rows that are no multiple of a larger block."""
MANY_QUERIES = 4
"""Query heads for each key/value head from which on values are small enough for a larger type."""
FEW_EXPERTS = 8
"""Experts of the models whose attention is small beside them, so that it gets larger types."""
LARGE = 80
"""Blocks of the models with 70 billion weights, whose values get a larger type."""
LARGE_KINDS = ("llama", "qwen2")


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
    """Query heads for each key/value head."""
    large: bool
    """Whether llama.cpp knows it as one of 70 billion weights."""
    experts: int = 0
    """Experts of a block."""

    @classmethod
    def of(cls, config: PreTrainedConfig, layout: BlockLayout, architecture: str) -> "MixtureModel":
        """Read it off a model's configuration; the architecture is llama.cpp's."""
        blocks, queries = int(config.num_hidden_layers), layout.heads // layout.key_value_heads
        plain = architecture == LARGE_KINDS[0] and queries == 1
        large = architecture in LARGE_KINDS and blocks == LARGE and not plain
        return cls(blocks, queries, large, 0 if layout.mixture is None else layout.mixture.count)


def matrix_of(layout: BlockLayout, projection: Projection) -> Matrix:
    """Return what a projection is to a mixture."""
    if any(p.role is Role.VALUE for p in layout.projections if p.module == projection.module):
        return Matrix.VALUE
    if projection.role is Role.KEY:
        return Matrix.KEY
    inputs, outputs = (group.projections for group in layout.groups[:2])
    if layout.attended_group is None and projection in (*inputs, *outputs):  # of linear attention
        return Matrix.VALUE if len(inputs) > 1 and projection == inputs[0] else Matrix.OTHER
    attended = layout.attended_group
    if attended is not None and projection in attended.projections:
        return Matrix.ATTENTION_OUTPUT
    return Matrix.DOWN if projection.residual is not None else Matrix.OTHER


def mixture_type(
    name: str, matrix: Matrix, columns: int, model: MixtureModel, block: int = 0, *, tied: bool = False
) -> str:
    """Return the name of the type that a matrix gets.

    Args:
        name: Name of a mixture; or of a type that is none, which all matrices get.
        matrix: What the matrix is.
        columns: Length of its rows.
        model: The model.
        block: Number of its block, from 0.
        tied: Of an embedding: whether it is the head as well.
    """
    kind = MIXTURES.get(name, name)
    if name not in MIXTURES:
        return fitting(kind, columns)
    if matrix is Matrix.HEAD or (matrix is Matrix.EMBEDDING and tied):
        if kind == "Q8_0" or not TYPES[kind].fits(columns):
            return fitting("Q8_0", columns)
        return fitting("Q6_K", columns)
    return fitting(_larger(name, matrix, block, model) or kind, columns)


def fitting(kind: str, columns: int) -> str:
    """Return the type, or the one that stands in for it where a row is no whole number of its blocks."""
    return kind if TYPES[kind].fits(columns) else NARROW.get(kind, kind)


def _larger(name: str, matrix: Matrix, block: int, model: MixtureModel) -> str | None:
    """Return the type of a matrix that a mixture makes larger, else None."""
    n, first_eighth = model.blocks, block < model.blocks // 8
    often = first_eighth or block >= 7 * n // 8 or (block - n // 8) % 3 == 2
    rules: dict[tuple[str, Matrix], str | None]
    rules = {
        ("Q2_K_S", Matrix.VALUE): "Q4_K" if model.queries >= MANY_QUERIES else None,
        ("Q2_K_S", Matrix.DOWN): "Q4_K" if first_eighth else None,
        ("Q2_K", Matrix.VALUE): "Q4_K" if model.queries >= MANY_QUERIES else "Q3_K",
        ("Q2_K", Matrix.DOWN): "Q3_K",
        ("Q2_K", Matrix.ATTENTION_OUTPUT): "Q3_K",
        ("Q3_K_M", Matrix.VALUE): "Q5_K" if block < 2 else "Q4_K",
        ("Q3_K_M", Matrix.DOWN): "Q5_K" if block < n // 16 else "Q4_K",
        ("Q3_K_M", Matrix.ATTENTION_OUTPUT): "Q4_K",
        ("Q3_K_L", Matrix.VALUE): "Q5_K",
        ("Q3_K_L", Matrix.DOWN): "Q5_K",
        ("Q3_K_L", Matrix.ATTENTION_OUTPUT): "Q5_K",
        ("Q4_K_S", Matrix.VALUE): "Q5_K" if block < 4 else None,
        ("Q4_K_S", Matrix.DOWN): "Q5_K" if first_eighth else None,
        ("Q4_K_M", Matrix.VALUE): "Q6_K" if often else None,
        ("Q4_K_M", Matrix.DOWN): "Q6_K" if often else None,
        ("Q5_K_M", Matrix.VALUE): "Q6_K" if often else None,
        ("Q5_K_M", Matrix.DOWN): "Q6_K" if often else None,
        ("Q4_0", Matrix.DOWN): "Q4_1" if first_eighth else None,
        ("Q5_0", Matrix.DOWN): "Q5_1" if first_eighth else None,
    }
    if model.experts == FEW_EXPERTS and matrix in (Matrix.VALUE, Matrix.KEY):
        return "Q8_0"
    if model.experts == FEW_EXPERTS and matrix is Matrix.ATTENTION_OUTPUT:
        return "Q5_K" if name in ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M") else None
    found = rules.get((name, matrix))
    small = (found or MIXTURES[name]) in ("Q3_K", "Q4_K")
    return "Q5_K" if matrix is Matrix.VALUE and model.large and small else found
