"""Mark dead inputs, damp a Hessian and invert it.

Source: OPTQ (Frantar et al., ICLR 2023) for the damping; docs/algorithm.md, "Damping and dead inputs".
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from aespa_pl.errors import NumericalError

DEAD_DIAGONAL = 1 / 2048
"""Diagonal given to an input that is always 0 (docs/algorithm.md, step 1)."""
FIRST_EXTRA_DAMPING, LAST_EXTRA_DAMPING = 0.01, 100.0
"""Fractions of the mean diagonal that are added, growing tenfold, until a Hessian can be factored."""


def damp(diagonal: Float[Tensor, "heads d_in"], damping: float) -> Float[Tensor, "heads d_in"]:
    """Return the diagonal of a Hessian, damped.

    A dead input's 0 becomes ``DEAD_DIAGONAL``; then ``damping``, a fraction of the mean diagonal (0.01: 1 %),
    is added to each head on its own.
    """
    revived = diagonal.masked_fill(diagonal == 0, DEAD_DIAGONAL)
    return revived + damping * revived.mean(-1, keepdim=True)


def inverse_factor(
    H: Float[Tensor, "heads d_in d_in"],
) -> tuple[Float[Tensor, "heads d_in d_in"], Float[Tensor, " heads"]]:
    """Return the upper Cholesky factor of ``H^-1`` and the damping that each head took.

    U has ``U^T U = H^-1``. The damping is the fraction of the mean diagonal that was added to make the
    factorization work, 0 where none was needed. Each head has its own, so that its factor does not depend on
    the heads beside it; a NumericalError says that 100 times the mean diagonal was not enough.
    """
    added = H.new_zeros(len(H))
    upper, usable = _inverse_upper(H)
    while not bool(usable.all()):
        failed = ~usable
        _raise_damping(added, failed)
        upper[failed], usable[failed] = _inverse_upper(_damped(H[failed], added[failed]))
    return upper, added


def solve(
    H: Float[Tensor, "heads d_in d_in"], B: Float[Tensor, "heads rows d_in"]
) -> tuple[Float[Tensor, "heads rows d_in"], Float[Tensor, " heads"]]:
    """Return ``B H^-1`` and the damping of each head, found as in ``inverse_factor``.

    The heads are solved one after the other, because a factor takes as much memory as H.
    """
    solved, added = torch.empty_like(B), H.new_zeros(len(H))
    for h in range(len(H)):
        one = slice(h, h + 1)
        while True:
            lower, failed = torch.linalg.cholesky_ex(_damped(H[one], added[one]))
            solved[h] = torch.cholesky_solve(B[h].T, lower[0]).T
            if not failed.any() and bool(torch.isfinite(solved[h]).all()):
                break
            _raise_damping(added, torch.arange(len(H), device=H.device) == h)
    return solved, added


def _inverse_upper(H: Tensor) -> tuple[Tensor, Bool[Tensor, " heads"]]:
    """Return the upper factors of the inverses, and which of them are factors indeed."""
    lower, failed = torch.linalg.cholesky_ex(H)
    # the identity is invertible at least
    lower.masked_fill_((failed != 0)[:, None, None], 0)
    lower.diagonal(dim1=-2, dim2=-1).masked_fill_((failed != 0)[:, None], 1)
    upper, failed_again = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    finite = torch.isfinite(upper).flatten(1).all(1)
    return upper, (failed == 0) & (failed_again == 0) & finite


def _damped(H: Tensor, added: Tensor) -> Tensor:
    """Return H with a fraction of each head's mean diagonal added; H itself where all are 0."""
    if not bool(added.any()):  # a copy would be memory for nothing
        return H
    damped = H.clone()
    diagonal = damped.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(added[:, None] * diagonal.mean(-1, keepdim=True))
    return damped


def _raise_damping(added: Tensor, failed: Tensor) -> None:
    """Raise, in place, the damping of the heads that failed, tenfold, while there is more to try."""
    if bool((added[failed] >= LAST_EXTRA_DAMPING / 2).any()):
        raise NumericalError(
            f"a matrix cannot be factored even with {LAST_EXTRA_DAMPING:g} times its mean diagonal added"
        )
    added[failed] = torch.where(added[failed] == 0, FIRST_EXTRA_DAMPING, 10 * added[failed])
