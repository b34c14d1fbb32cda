"""Sum up what the attention of a value head makes of its inputs, over the query heads that share it.

With the probabilities A_q of a query head and the inputs X of the attention block, ``[L, d]`` here, the
values have the inputs ``A_q X``. The sum of ``(A_q X)^T A_q X`` over the query heads is also
``X^T (sum_q A_q^T A_q) X``: one product with X for all of them. Where many query heads share a value head and
segments are not much longer than d, that takes fewer operations.

Where the text has many more tokens than X has columns, the rows of every second, third ... token are enough
(docs/performance.md).

Source: docs/algorithm.md, step 1; Eq. 17 to 22 of the paper.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from aespa_pl.algorithm.objectives import multiplying_in, operand
from aespa_pl.algorithm.second_moments import add_gram, add_symmetric, bounded, computed_fraction, mirror
from aespa_pl.models.family import BlockLayout
from aespa_pl.models.observed import Attention

CHUNKS, CHUNK_ROWS = 8, 128
"""Rows of the attention probabilities A are in so many chunks, each without the columns behind its last row,
because all models are causal. That leaves out 7 of 16 products, and never more than one chunk of one head's
is in memory. No chunk has fewer rows than this: with 32 all of it took up to half as long again (512 and 2048
tokens, one thread of a CPU)."""


LEAST_ROWS = 32
"""Rows of a head that are taken of each segment at least, so that early and late positions count alike."""


def stride(least: int, tokens: int, length: int, d: int) -> int:
    """Return s where every s-th token is enough, so that ``least`` or more remain for each of ``d`` columns.

    The calibration text has ``tokens`` in segments of ``length``. Where ``least`` is 0 all count.
    """
    return max(1, min(tokens // (least * d), length // LEAST_ROWS)) if least else 1


def chunks(length: int, stride: int = 1) -> list[slice]:
    """Return the rows of A, every ``stride``-th, that are computed at once in segments of a ``length``."""
    step = max(CHUNK_ROWS, -(-length // (CHUNKS * stride))) * stride
    starts = range(0, length - stride + 1, step)
    return [slice(start + stride - 1, min(start + step, length), stride) for start in starts]


def row_count(rows: slice) -> int:
    """Return the number of rows of a slice with an end."""
    return len(range(rows.start, rows.stop, rows.step))


def multiplications(shared: int, length: int, d: int, stride: int = 1) -> tuple[float, float]:
    """Return those of a segment and a value head: by A X of each ``shared`` query head, by sums of A^T A."""
    gram = d * d * computed_fraction(d)
    inputs = squares = 0.0
    for chunk in chunks(length, stride):
        rows = row_count(chunk)
        inputs += rows * (chunk.stop * d + gram)
        squares += rows * chunk.stop**2 * computed_fraction(chunk.stop)
    return shared * inputs, shared * squares + length**2 * d + length * gram


def over_tokens(shared: int, length: int, d: int, stride: int = 1) -> bool:
    """Tell whether sums of A^T A over the query heads take fewer multiplications."""
    each, over = multiplications(shared, length, d, stride)
    return over < each


class AttendedInputs:
    """Adds up the inputs of value heads in one batch, in memory that all heads use."""

    def __init__(self, attention: Attention, X: Tensor, layout: BlockLayout, stride: int = 1) -> None:
        """Begin a batch with X ``[B, L, d]``; of A X every ``stride``-th row counts, in place of all."""
        B, L, d = X.shape
        self._chunks_of_rows = chunks(L, stride)
        self._rows = slice(stride - 1, L, stride)
        self._weight = L / row_count(self._rows)
        self._attention, self._X = attention, operand(X.float())
        inverse = attention.value_inverse
        self._inverse = None if inverse is None else bounded(inverse, -1)  # [B, n_kv, L]
        self._shared = layout.heads // layout.key_value_heads
        self._over_tokens = over_tokens(self._shared, L, d, stride)
        shape = (B, L, L) if self._over_tokens else (B, self._shared, row_count(self._rows), d)
        self._memory = self._X.new_empty(shape, dtype=torch.float32)
        self._product = self._X.new_empty(L, d, dtype=torch.float32) if self._over_tokens else None

    def add(
        self,
        head: int,
        total: Tensor,
        factor: float,
        *,
        root: Tensor | None = None,
        shift: Tensor | None = None,
        shifts: Tensor | None = None,
    ) -> None:
        """Add ``factor (A X)^T A X`` of a value head to ``total`` ``[d, d]``, above the diagonal alone.

        Rows of A X are multiplied by ``root`` ``[B, query heads that share the head, L, 1]``. ``shifts``
        ``[d_h, d]`` gets ``factor shift^T A X``, with the outputs' ``shift`` ``[B, query heads, L, d_h]``.
        """
        products = self._over_tokens_of if self._over_tokens else self._inputs_of
        factor *= self._weight
        for left, right, shifted in products(head, root, shift):
            add_symmetric(total, left, right, factor=factor)
            if shifts is not None and shifted is not None:
                shifts.addmm_(operand(shifted).T, left, alpha=factor)

    def _chunks(self, head: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows and their A, ``[B, query heads, rows, end of rows]`` in float32."""
        query_heads = slice(head * self._shared, (head + 1) * self._shared)
        for chunk in self._chunks_of_rows:
            with multiplying_in("float32"):  # an error of a score is one of all that it weights
                A = self._attention.probabilities(query_heads, chunk).float()
            if self._inverse is not None:  # the norm of a value multiplies its error
                A = A * self._inverse[:, head, None, None, : chunk.stop]
            yield chunk, A

    def _inputs_of(
        self, head: int, root: Tensor | None, shift: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield A X twice, and the shift, of all query heads and segments as rows."""
        AX, done = self._memory, 0
        for chunk, A in self._chunks(head):
            part = slice(done, done + A.shape[2])
            for i in range(self._shared):  # one product for all would copy X for each query head
                torch.bmm(operand(A[:, i]), self._X[:, : chunk.stop], out=AX[:, i, part])
            done = part.stop
        if root is not None:
            AX.mul_(root[:, :, self._rows])
        rows = operand(AX.flatten(0, 2))
        yield rows, rows, None if shift is None else shift[:, :, self._rows].flatten(0, 2)

    def _over_tokens_of(
        self, head: int, root: Tensor | None, shift: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield X, ``sum_q A_q^T A_q X`` and ``sum_q A_q^T shift_q`` of each segment."""
        squares = self._memory.zero_()  # the sum of A^T A, [B, L, L]
        shifted = None if shift is None else shift.new_zeros(len(shift), *shift.shape[2:])  # [B, L, d_h]
        for chunk, A in self._chunks(head):
            weighted = operand((A if root is None else A * root[:, :, chunk]).flatten(1, 2))
            for b, rows in enumerate(weighted):
                add_gram(squares[b, : chunk.stop, : chunk.stop], rows)
                if shift is not None and shifted is not None:
                    shifted[b, : chunk.stop].addmm_(rows.T, operand(shift[b, :, chunk].flatten(0, 1)))
        for b, X in enumerate(self._X):
            mirror(squares[b])
            product = torch.mm(operand(squares[b]), X, out=self._product)
            yield X, operand(product), None if shifted is None else shifted[b]
