"""Run BoA, which is OPTQ with a loss that couples the rows of a head as well as the columns.

The loss of a query or key projection is ``tr(G dW H dW^T)``: its Hessian is the Kronecker product of
``G`` and ``H``, and so is the factor of its inverse. OPTQ's rule on that factor visits one row of every
head after the other; the errors of a row are compensated in its own later columns, through H, and in the
later rows, through both.

Source: Kim et al., "BoA: Attention-aware Post-training Quantization without Backpropagation"
(arXiv 2406.13474).
"""

from operator import itemgetter

import torch
from jaxtyping import Float
from torch import Tensor

from aespa_pl.algorithm.hessian import inverse_factor
from aespa_pl.algorithm.optq import factor_columns, round_columns
from aespa_pl.algorithm.quantizer import Grid, dequantize


def update_rows(
    W: Float[Tensor, "heads rows d_in"],
    H: Float[Tensor, "1 d_in d_in"],
    G: Float[Tensor, "heads rows rows"],
    grid: Grid,
) -> tuple[
    Float[Tensor, "heads rows d_in"], Float[Tensor, "heads rows d_in"], Float[Tensor, " problems"]
]:
    """Round row after row of every head, and compensate in the rows to come.

    With ``U^T U = G^-1`` and the row ``w_i`` as it was before its first column was rounded to ``q_i``, row
    k > i moves by ``- (w_i - q_i) U_ik / U_ii``: the sum of OPTQ's updates over the columns of row i.

    Returns:
        The value that each weight had at the moment it was about to be rounded, its integer, and the
        largest extra damping that the factorizations of H and G took.

    Raises:
        NumericalError: H or G cannot be factored.
    """
    U, added = inverse_factor(G)
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
