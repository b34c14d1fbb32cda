"""Dead inputs, damping and the inverse of a Hessian."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

DEAD_DIAGONAL = 1 / 2048
"""Diagonal given to an input that is always 0 (algorithm.md)."""
MAX_DAMPING_FACTOR = 10_000
NOT_FACTORED = "the Hessian cannot be factored, whatever the damping"


class HeadMatrices(ABC):
    """Matrices ``[heads, d_in, d_in]`` that are not all in memory: those of a slice of heads are a tensor."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Heads, d_in, d_in."""

    @abstractmethod
    def __getitem__(self, heads: slice) -> Float[Tensor, "some d_in d_in"]:
        """Return the matrices of some heads, on the device that they are worked on."""


def damp(diagonal: Float[Tensor, "heads d_in"], damping: float) -> Float[Tensor, "heads d_in"]:
    """Return the diagonal of a Hessian, damped.

    Dead inputs are revived, and ``damping`` times the mean is added, for each head on its own.
    """
    revived = diagonal.masked_fill(diagonal == 0, DEAD_DIAGONAL)
    return revived + damping * revived.mean(-1, keepdim=True)


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
    H: Float[Tensor, "heads d_in d_in"] | HeadMatrices, B: Float[Tensor, "heads rows d_in"]
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
