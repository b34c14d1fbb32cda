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
from aespa_pl.algorithm.hessian import unit_factor
from aespa_pl.algorithm.quantizer import Grid, dequantize, split_zero
from aespa_pl.algorithm.workspace import chunk_elements

LAZY_COLUMNS, LAZY_PART = 128, 16
"""Columns that take the errors of all before them together, and how many of these do again."""
CPU_CHUNK = 2**22
"""Number of elements of the Hessians that each thread factors at once."""
ACCELERATOR_CHUNK = 2**28
"""The same number on an accelerator, where two matrices of that size, 1 GB each, exist meanwhile."""


@dataclass(frozen=True)
class FactoredColumns:
    """Holds the order in which columns are visited, and the factor that compensates their errors."""

    order: Int[Tensor, "heads d_in"]
    upper: Float[Tensor, "heads d_in d_in"]
    """C with ``H = C D C^T``, of H in this order."""
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

    With ``G = C D C^T`` row i is rounded as ``w_i - sum_k C_ki (q_k - w_k)`` over the rows k before it.

    It returns what ``update_weights`` does; the extra damping is the largest that H and G took. This is BoA
    ("BoA: Attention-aware Post-training Quantization without Backpropagation", arXiv 2406.13474). The Hessian
    of the loss ``tr(G dW H dW^T)`` is the Kronecker product of ``G`` and ``H``, and so is its factor: errors
    are compensated in a row's own later columns through H, and in later rows through both.
    """
    # a head whose keys or queries are all 0 has no loss that integers could change
    C, added = unit_factor(G + torch.diag_embed((G.diagonal(dim1=1, dim2=2) == 0).to(G.dtype)))
    columns = factor_columns(H)
    target, visited, integers = W.clone(), torch.empty_like(W), torch.empty_like(W)
    for i in range(W.shape[1]):
        row = slice(i, i + 1)
        of_row = grid.merged(itemgetter((slice(None), row)))
        visited[:, row], integers[:, row] = round_columns(target[:, row], columns, of_row)
        error = dequantize(integers[:, row], of_row) - W[:, row]  # [heads, 1, d_in]
        target[:, i + 1 :] -= C[:, i, i + 1 :, None] * error
    return visited, integers, torch.maximum(columns.added, added.max())


def factor_columns(H: Float[Tensor, "heads d_in d_in"]) -> FactoredColumns:
    """Order the columns by decreasing ``H_jj``, and factor H."""
    order = H.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)
    return FactoredColumns(order, *unit_factor(H, order))


def factored_for_all(H: Float[Tensor, "heads d_in d_in"]) -> FactoredColumns | None:
    """Return the factors of all heads, to be used again; None where they are too large to keep."""
    return factor_columns(H) if len(H) <= _heads_at_once(H) else None


def _heads_at_once(H: Tensor) -> int:
    """Return how many heads are factored together."""
    return max(1, chunk_elements(H, cpu=CPU_CHUNK, accelerator=ACCELERATOR_CHUNK) // H.shape[-1] ** 2)


def round_columns(
    W: Float[Tensor, "heads rows d_in"], factored: FactoredColumns, grid: Grid
) -> tuple[Float[Tensor, "heads rows d_in"], Float[Tensor, "heads rows d_in"]]:
    """Return each weight as it was about to be rounded, and its integer.

    Column j is rounded as ``w_j - sum_k (q_k - w_k) C_kj`` over the columns k before it. That is what OPTQ's
    updates ``w_j - (w_k - q_k) U_kj / U_kk`` with ``U^T U = H^-1`` make of it, without the inverse.
    """
    heads, _, d_in = W.shape
    head, order, C = torch.arange(heads, device=W.device)[:, None], factored.order, factored.upper
    # columns lie one after the other in memory: one of a wide matrix would touch a page for each of its rows
    by_column, scale, zero = (x.mT.contiguous() for x in (W, grid.scale, grid.zero_point))
    group = order // (d_in // scale.shape[1])
    visited, integers, errors = (torch.empty_like(by_column) for _ in range(3))
    for start in range(0, d_in, LAZY_COLUMNS):
        here = slice(start, start + LAZY_COLUMNS)
        columns, groups = order[:, here], group[:, here]
        target = w = by_column[head, columns]  # [heads, columns, rows]
        if start:
            target = w - C[:, :start, here].mT @ errors[:, :start]
        steps = scale[head, groups] * grid.zeta[columns][..., None], zero[head, groups]
        target, q, errors[:, here] = _round_lazily(target, w, steps, C[:, here, here], grid.integers)
        visited[head, columns], integers[head, columns] = target, q
    del by_column, errors
    return visited.mT.contiguous(), integers.mT.contiguous()


def _round_lazily(
    target: Tensor, w: Tensor, steps: tuple[Tensor, Tensor], C: Tensor, allowed: Integers
) -> tuple[Tensor, Tensor, Tensor]:
    """Compensate within these columns; return them as they were rounded, their integers and errors."""
    step, zero = steps
    target, integers, errors = target.clone(), torch.empty_like(w), torch.empty_like(w)
    whole, rest = split_zero(zero)
    for j in range(w.shape[1]):
        last = j - j % LAZY_PART + LAZY_PART
        if j and j % LAZY_PART == 0:
            target[:, j:last] -= C[:, :j, j:last].mT @ errors[:, :j]
        q = nearest_to(target[:, j] / step[:, j], (whole[:, j], rest[:, j]), allowed)
        errors[:, j] = error = step[:, j] * (q - zero[:, j]) - w[:, j]
        target[:, j + 1 : last] -= C[:, j, j + 1 : last, None] * error[:, None]
        integers[:, j] = q
    return target, integers, errors
