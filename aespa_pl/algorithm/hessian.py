"""Dead inputs, damping and the inverse of a Hessian."""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

DEAD_DIAGONAL = 1 / 2048
"""Diagonal given to an input that is always 0 (algorithm.md)."""
MAX_DAMPING_FACTOR = 10_000
NOT_FACTORED = "the Hessian cannot be factored, whatever the damping"


def dead_inputs(H: Float[Tensor, "heads d_in d_in"]) -> Bool[Tensor, "heads d_in"]:
    """Return which inputs are 0 in every calibration token; their weights don't matter."""
    return H.diagonal(dim1=-2, dim2=-1) == 0


def damp(H: Float[Tensor, "heads d_in d_in"], damping: float) -> Float[Tensor, "heads d_in d_in"]:
    """Return H with dead inputs revived and ``damping`` times its mean diagonal added, for each head."""
    H = H.clone()
    diagonal = H.diagonal(dim1=-2, dim2=-1)  # a view
    diagonal[dead_inputs(H)] = DEAD_DIAGONAL
    diagonal += damping * diagonal.mean(-1, keepdim=True)
    return H


def inverse_factor(
    H: Float[Tensor, "heads d_in d_in"],
) -> tuple[Float[Tensor, "heads d_in d_in"], float]:
    """Return the upper Cholesky factor of ``H^-1`` and the damping that it took.

    Returns:
        U with ``U^T U = H^-1``, and the share of the mean diagonal that had to be added to make the
        factorization work: 0 where none was needed.

    Raises:
        ArithmeticError: H cannot be factored even with 100 times its mean diagonal added.
    """
    for lower, added in _factors(H):
        inverse = torch.cholesky_inverse(lower)
        upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
        if not failed.any() and bool(torch.isfinite(upper).all()):
            return upper, added
    raise ArithmeticError(NOT_FACTORED)


def solve(
    H: Float[Tensor, "heads d_in d_in"], B: Float[Tensor, "heads rows d_in"]
) -> Float[Tensor, "heads rows d_in"]:
    """Return ``B H^-1``, one head after the other: a factor takes as much memory as H.

    Raises:
        ArithmeticError: H cannot be factored even with 100 times its mean diagonal added.
    """
    solved = torch.empty_like(B)
    for h in range(H.shape[0]):
        for lower, _ in _factors(H[h : h + 1]):
            solved[h] = torch.cholesky_solve(B[h].T, lower[0]).T
            if bool(torch.isfinite(solved[h]).all()):
                break
        else:
            raise ArithmeticError(NOT_FACTORED)
    return solved


def _factors(H: Tensor) -> Iterator[tuple[Tensor, float]]:
    """Yield the lower factor of H with more and more of its mean diagonal added, and that share."""
    added, mean = 0.0, H.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    identity = torch.eye(H.shape[-1], dtype=H.dtype, device=H.device)
    while added <= MAX_DAMPING_FACTOR * 0.01:
        lower, failed = torch.linalg.cholesky_ex(H + added * mean * identity)
        if not failed.any():
            yield lower, added
        added = 10 * added if added else 0.01
