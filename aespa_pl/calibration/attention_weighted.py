"""Compute attention-weighted inputs ``A X``: the inputs of a value head, weighted by its probabilities A.

All models are causal, so A is computed in chunks of rows, each without the columns behind its last row;
then never more than one chunk of one head's probabilities is in memory.

Notation as in ``models/family.py``; X is the input of the attention block.
"""

from collections.abc import Iterator

from torch import Tensor

from aespa_pl.algorithm.objectives import multiplying_in, operand
from aespa_pl.models.family import BlockLayout
from aespa_pl.models.observed import Attention

CHUNKS, CHUNK_ROWS = 8, 128
"""Rows are in so many chunks, which leaves out 7 of 16 products; no chunk has fewer rows than this,
because with 32 all of it took up to half as long again (512 and 2048 tokens, one thread of a CPU)."""


def attention_weighted_inputs(
    attention: Attention, X: Tensor, layout: BlockLayout, heads: range
) -> Iterator[Tensor]:
    """Yield ``A X`` for some value heads, ``[B * query heads that share it * L, d]``, in float32.

    All lie in the same memory: each is the caller's only until the next is asked for.

    X is the input of the attention block, ``[B, L, d]``.
    """
    X = operand(X.float())
    B, L, d = X.shape
    shared, step = layout.heads // layout.key_value_heads, chunk_rows(L)
    AX = X.new_empty(B, shared, L, d)
    for head in heads:
        query_heads = slice(head * shared, (head + 1) * shared)
        for start in range(0, L, step):
            rows = slice(start, min(L, start + step))
            with multiplying_in("float32"):  # an error of a score is one of all that it weights
                A = attention.probabilities(query_heads, rows).float()  # [B, shared, rows, stop]
            # Side by side, because a product with X for each query head would copy X for each.
            product = operand(A.flatten(1, 2)) @ X[:, : rows.stop]
            AX[:, :, rows] = product.unflatten(1, (shared, -1))
        yield AX.flatten(0, -2)


def chunk_rows(length: int) -> int:
    """Return of how many rows A is computed at once in segments of ``length`` tokens."""
    return max(CHUNK_ROWS, -(-length // CHUNKS))
