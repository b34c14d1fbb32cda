"""Compute weights that make up for the changes of the quantized blocks before them.

The quantized blocks have changed the input of a projection from X_fp to X, and the residual stream
that the output of some is added to from R_fp to R. The weights W_c with the least
``E |R + W_c X - R_fp - W X_fp|^2`` are

    W_c = W + (W E[(X_fp - X) X^T] + E[(R_fp - R) X^T]) H^-1,  H = E[X X^T].

With the outputs Y = R + W X and Y_fp = R_fp + W X_fp, the matrix before ``H^-1`` is ``E[(Y_fp - Y) X^T]``.
Only a part of the change is taken, alpha. All of it is worse than none: it is a regression, which shrinks
what it predicts, and every block would shrink again what the blocks before it have left.

Source: GPTAQ (arXiv 2504.02692) and QEP for the term with the inputs; the one with the residual stream
is ours.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from aespa_pl.algorithm.hessian import solve


def corrected_weights(
    W: Float[Tensor, "heads rows d_in"],
    shift: Float[Tensor, "heads rows d_in"],
    H: Float[Tensor, "#heads d_in d_in"],
    alpha: float,
) -> tuple[Float[Tensor, "heads rows d_in"], Float[Tensor, " problems"]]:
    """Return ``W + alpha shift H^-1``, and the extra damping of each H.

    The shift is ``E[(Y_fp - Y) X^T]``, scaled as H; without a residual stream it is ``W E[(X_fp - X) X^T]``.
    """
    # where heads share H, there is one problem with the rows of all
    solved, added = solve(H, shift.flatten(0, 1)[None] if len(H) == 1 else shift)
    return torch.add(W, solved.view_as(W), alpha=alpha), added
