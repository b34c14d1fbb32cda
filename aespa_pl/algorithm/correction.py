"""Weights whose outputs on the quantized stream's inputs are those on the full-precision stream's.

Blocks that are quantized already have changed the input of a projection from X_fp to X. The weights
with the least ``E |W_target X - W X_fp|^2`` are ``W + W E[(X_fp - X) X^T] H^-1``, ``H = E[X X^T]``; a
share alpha of the change is taken, for what is fitted to the calibration text does not all hold
elsewhere.

Source: GPTAQ (arXiv 2504.02692) and QEP; alpha and the damped H are what keeps it from overfitting.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from aespa_pl.algorithm.hessian import solve


def corrected_weights(
    W: Float[Tensor, "heads rows d_in"],
    shift: Float[Tensor, "#heads d_in d_in"],
    H: Float[Tensor, "#heads d_in d_in"],
    share: float,
) -> Float[Tensor, "heads rows d_in"]:
    """Return ``W + share W shift H^-1``.

    Args:
        W: Original weights.
        shift: ``E[(X_fp - X) X^T]``, scaled as H.
        H: Damped Hessian.
        share: alpha, 0 to 1.

    Raises:
        ArithmeticError: H cannot be factored, whatever the damping.
    """
    if H.shape[0] == 1:  # one problem with all rows
        change = solve(H, (W.flatten(0, 1) @ shift[0])[None]).view_as(W)
    else:
        change = solve(H, W @ shift)
    return torch.add(W, change, alpha=share)
