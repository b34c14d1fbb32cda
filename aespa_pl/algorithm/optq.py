"""Run OPTQ, which compensates each column's rounding error in the columns that are not yet rounded.

Source: Frantar et al., "OPTQ: Accurate Quantization for Generative Pre-trained Transformers"
(ICLR 2023), Section 3; used as the start of the rounding (Section 4.1 of the paper).
"""

from dataclasses import dataclass
from operator import itemgetter

import torch
from jaxtyping import Float, Int
from torch import Tensor

from aespa_pl.algorithm.grid_types import Integers, nearest_to
from aespa_pl.algorithm.hessian import inverse_factor
from aespa_pl.algorithm.quantizer import Grid, dequantize, split_zero
from aespa_pl.algorithm.workspace import chunk_elements

LAZY_COLUMNS = 128
"""Columns whose updates reach the rest of the matrix together (lazy batch updates)."""
CPU_CHUNK = 2**22
"""Number of elements of the Hessians that each thread factors at once."""
ACCELERATOR_CHUNK = 2**28
"""The same number on an accelerator, where four matrices of that size, 1 GB each, exist meanwhile."""


@dataclass(frozen=True)
class FactoredColumns:
    """Holds the order in which columns are visited, and the factor that compensates their errors."""

    order: Int[Tensor, "heads d_in"]
    upper: Float[Tensor, "heads d_in d_in"]
    """U with ``U^T U = H^-1``, of H in this order."""
    added: Float[Tensor, " heads"]
    """Extra damping that the factorization took."""


def update_weights(
    W: Float[Tensor, "heads rows d_in"],
    H: Float[Tensor, "#heads d_in d_in"],
    grid: Grid,
    factored: FactoredColumns | None = None,
) -> tuple[Float[Tensor, "heads rows d_in"], Float[Tensor, "heads rows d_in"], Float[Tensor, " problems"]]:
    """Visit the columns in order of decreasing ``H_jj``, round each, compensate in those to come.

    It returns the value that each weight had when it was about to be rounded, the integer that it was rounded
    to, and the extra damping that the factorization of each H took (0: none). Some heads are factored at a
    time, unless all are ``factored`` already.
    """
    size = W.shape[0] if factored is not None or len(H) == 1 else _heads_at_once(H)
    parts = []
    for i in range(0, W.shape[0], size):
        columns = factored or factor_columns(H if len(H) == 1 else H[i : i + size])
        parts.append((*round_columns(W[i : i + size], columns, grid.heads(i, size)), columns.added))
    visited, integers, added = zip(*parts, strict=True)
    return torch.cat(visited), torch.cat(integers), torch.cat(added)


def update_rows(
    W: Float[Tensor, "heads rows d_in"],
    H: Float[Tensor, "1 d_in d_in"],
    G: Float[Tensor, "heads rows rows"],
    grid: Grid,
) -> tuple[Float[Tensor, "heads rows d_in"], Float[Tensor, "heads rows d_in"], Float[Tensor, " problems"]]:
    """Round row after row of every head, and compensate in the rows to come.

    With ``U^T U = G^-1`` and the row ``w_i`` as it was before its first column was rounded to ``q_i``, row
    k > i moves by ``- (w_i - q_i) U_ik / U_ii``: the sum of OPTQ's updates over the columns of row i.

    It returns what ``update_weights`` does; the extra damping is the largest that H and G took. This is BoA
    ("BoA: Attention-aware Post-training Quantization without Backpropagation", arXiv 2406.13474). The Hessian
    of the loss ``tr(G dW H dW^T)`` is the Kronecker product of ``G`` and ``H``, and so is the factor of its
    inverse: errors are compensated in a row's own later columns through H, and in later rows through both.
    """
    # a head whose keys or queries are all 0 has no loss that integers could change
    U, added = inverse_factor(G + torch.diag_embed((G.diagonal(dim1=1, dim2=2) == 0).to(G.dtype)))
    columns = factor_columns(H)
    pending, visited, integers = W.clone(), torch.empty_like(W), torch.empty_like(W)
    for i in range(W.shape[1]):
        row = slice(i, i + 1)
        of_row = grid.merged(itemgetter((slice(None), row)))
        visited[:, row], integers[:, row] = round_columns(pending[:, row], columns, of_row)
        # before the row's own compensation: that moved the error to later columns, it didn't undo it
        lost = pending[:, row] - dequantize(integers[:, row], of_row)  # [heads, 1, d_in]
        ratio = (U[:, i, i + 1 :] / U[:, i, i, None])[..., None]  # [heads, later rows, 1]
        pending[:, i + 1 :] -= ratio * lost
    return visited, integers, torch.maximum(columns.added, added.max())


def factor_columns(H: Float[Tensor, "heads d_in d_in"]) -> FactoredColumns:
    """Order the columns by decreasing ``H_jj``, and factor the inverse."""
    order = H.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)
    by_row = order[:, :, None].expand(H.shape)
    return FactoredColumns(order, *inverse_factor(H.gather(1, by_row).gather(2, by_row.transpose(1, 2))))


def factored_for_all(H: Float[Tensor, "heads d_in d_in"]) -> FactoredColumns | None:
    """Return the factors of all heads, to be used again; None where they are too large to keep."""
    return factor_columns(H) if len(H) <= _heads_at_once(H) else None


def _heads_at_once(H: Tensor) -> int:
    """Return how many heads are factored together."""
    return max(1, chunk_elements(H, cpu=CPU_CHUNK, accelerator=ACCELERATOR_CHUNK) // H.shape[-1] ** 2)


def round_columns(
    W: Float[Tensor, "heads rows d_in"], factored: FactoredColumns, grid: Grid
) -> tuple[Float[Tensor, "heads rows d_in"], Float[Tensor, "heads rows d_in"]]:
    """Return each weight as it was about to be rounded, and its integer."""
    heads, rows, d_in = W.shape
    columns = factored.order[:, None].expand(heads, rows, d_in)
    U, pending = factored.upper, W.gather(2, columns)
    step, zero = (x.gather(2, columns) for x in (grid.step(), grid.zero()))
    integers = torch.empty_like(pending)
    for start in range(0, d_in, LAZY_COLUMNS):
        here, later = slice(start, start + LAZY_COLUMNS), slice(start + LAZY_COLUMNS, None)
        parts = (pending[..., here], step[..., here], zero[..., here], U[:, here, here])
        integers[..., here], errors = _round_lazily(*parts, grid.integers)
        pending[..., later] -= errors @ U[:, here, later]
    back = factored.order.argsort(-1)[:, None].expand(heads, rows, d_in)
    return pending.gather(2, back), integers.gather(2, back)


def _round_lazily(
    pending: Tensor, step: Tensor, zero: Tensor, U: Tensor, allowed: Integers
) -> tuple[Tensor, Tensor]:
    """Compensate within these columns, in place; return their integers and the errors to compensate.

    Columns lie one after the other in memory meanwhile: a column of a wide matrix touches a page for each of
    its rows.
    """
    w, s, z = (x.mT.contiguous() for x in (pending, step, zero))
    integers, errors = torch.empty_like(w), torch.empty_like(w)
    whole, rest = split_zero(z)
    for j in range(w.shape[1]):
        q = nearest_to(w[:, j] / s[:, j], (whole[:, j], rest[:, j]), allowed)
        error = (w[:, j] - s[:, j] * (q - z[:, j])) / U[:, j, j, None]
        # Column j itself must stay as it was about to be rounded.
        w[:, j + 1 :] -= U[:, j, j + 1 :, None] * error[:, None]
        errors[:, j], integers[:, j] = error, q
    pending.copy_(w.mT)
    return integers.mT, errors.mT.contiguous()
