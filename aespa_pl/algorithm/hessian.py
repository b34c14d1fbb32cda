"""Mark dead inputs, damp a Hessian, factor it, and compute weights that make up for the blocks before.

Source: OPTQ (Frantar et al., ICLR 2023) for the damping; docs/algorithm.md, "Damping and dead inputs".
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from aespa_pl.errors import NumericalError

DEAD_DIAGONAL = 1 / 2048
"""Diagonal given to an input that is always 0 (docs/algorithm.md, step 1)."""
LEAST_DAMPING, MOST_DAMPING = 0.01, 0.3
"""Limits of a damping that follows the number of tokens; the first is OPTQ's (docs/algorithm.md)."""
FIRST_EXTRA_DAMPING, LAST_EXTRA_DAMPING = 0.01, 100.0
"""Fractions of the mean diagonal that are added, growing tenfold, until a Hessian can be factored."""


def damping_for(damping: float | Literal["auto"], inputs: int, tokens: int) -> float:
    """Return the share of the mean diagonal that is added to an H of so many inputs and tokens.

    The fewer tokens an input has, the more of the loss that integers save on H is chance.
    """
    if damping != "auto":
        return damping
    return min(max(LEAST_DAMPING, inputs / max(1, tokens)), MOST_DAMPING)


def damp(diagonal: Float[Tensor, "heads d_in"], damping: float) -> Float[Tensor, "heads d_in"]:
    """Return the diagonal of a Hessian, damped.

    A dead input's 0 becomes ``DEAD_DIAGONAL``; then a fraction ``damping`` of each head's mean diagonal is
    added.
    """
    revived = diagonal.masked_fill(diagonal == 0, DEAD_DIAGONAL)
    return revived + damping * revived.mean(-1, keepdim=True)


def damped(
    H: Float[Tensor, "heads d d"], share: float | Float[Tensor, " heads"]
) -> Float[Tensor, "heads d d"]:
    """Return H, or G, with a share of each head's mean diagonal added to the diagonal, in new memory."""
    found, share = H.clone(), share[:, None] if isinstance(share, Tensor) else share
    diagonal = found.diagonal(dim1=1, dim2=2)
    diagonal += share * diagonal.mean(-1, keepdim=True)
    return found


def unit_factor(
    H: Float[Tensor, "heads d_in d_in"], order: Int[Tensor, "heads d_in"] | None = None
) -> tuple[Float[Tensor, "heads d_in d_in"], Float[Tensor, " heads"]]:
    """Return C of ``H = C D C^T``, unit upper triangular, and the damping that each head took.

    D is a diagonal. Where the errors ``e_k`` of all inputs before j are fixed, ``- sum_k e_k C_kj`` is the
    error of input j that costs least. With an ``order`` H is taken in it. The damping is the fraction of the
    mean diagonal that was added to make the factorization work, 0 where none was needed. Each head has its
    own, so that its factor does not depend on the heads beside it; a NumericalError says that 100 times the
    mean diagonal was not enough.
    """
    lower, added = _factored(H, order)
    upper = lower.flip(1, 2)
    return upper.div_(upper.diagonal(dim1=1, dim2=2)[:, None].clone()), added


def remaining_variances(
    H: Float[Tensor, "d_in d_in"], order: Int[Tensor, " d_in"] | None = None
) -> Float[Tensor, " d_in"]:
    """Return D of ``H = C D C^T``, as ``unit_factor`` has it: each input's variance given the later ones.

    With an ``order`` H is taken in it, and so is D.
    """
    return _factored(H[None], None if order is None else order[None])[0][0].diagonal().flip(0).square()


def corrected_weights(
    W: Float[Tensor, "heads rows d_in"],
    shift: Float[Tensor, "heads rows d_in"],
    H: Float[Tensor, "#heads d_in d_in"],
    alpha: float,
) -> tuple[Float[Tensor, "heads rows d_in"], Float[Tensor, " problems"]]:
    """Return ``W + alpha shift H^-1``, and the extra damping of each H, found as in ``unit_factor``.

    The quantized blocks have changed the input of a projection from X_fp to X, and the residual stream that
    the output of some is added to from R_fp to R. The weights W_c with the least
    ``E |R + W_c X - R_fp - W X_fp|^2`` are ``W + E[(Y_fp - Y) X^T] H^-1``, with ``H = E[X X^T]``,
    ``Y = R + W X`` and ``Y_fp = R_fp + W X_fp``. The shift is ``E[(Y_fp - Y) X^T]``, scaled as H.

    Only a part of the change is taken, alpha. All of it is worse than none: it is a regression, which shrinks
    what it predicts, and every block would shrink again what the blocks before it have left.

    Source: GPTAQ (arXiv 2504.02692) and QEP without a residual stream; the term with it is ours.
    """
    # where heads share H, there is one problem with the rows of all
    B = shift.flatten(0, 1)[None] if len(H) == 1 else shift
    solved, added = torch.empty_like(B), H.new_zeros(len(H))
    for h in range(len(H)):  # one after the other: a factor takes as much memory as H
        one = slice(h, h + 1)
        while True:
            # where nothing is added, a copy would be memory for nothing
            lower, failed = torch.linalg.cholesky_ex(damped(H[one], added[one]) if added[h] else H[one])
            solved[h] = torch.cholesky_solve(B[h].T, lower[0]).T
            if not failed.any() and bool(torch.isfinite(solved[h]).all()):
                break
            _raise_damping(added, torch.arange(len(H), device=H.device) == h)
    return torch.add(W, solved.view_as(W), alpha=alpha), added


def _factored(H: Tensor, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the lower factors of H with its inputs in reverse, and the damping that each head took."""
    added = H.new_zeros(len(H))
    lower, usable = _reversed_cholesky(H, order)
    while not bool(usable.all()):
        failed = ~usable
        _raise_damping(added, failed)
        lower[failed], usable[failed] = _reversed_cholesky(
            damped(H[failed], added[failed]), None if order is None else order[failed]
        )
    return lower, added


def _reversed_cholesky(H: Tensor, order: Tensor | None = None) -> tuple[Tensor, Bool[Tensor, " heads"]]:
    """Return the lower factors of H with its inputs in reverse, and which of them are factors indeed."""
    if order is None:
        backwards = H.flip(1, 2)
    else:
        heads, last = torch.arange(len(H), device=H.device)[:, None, None], order.flip(1)
        backwards = H[heads, last[:, :, None], last[:, None]]
    lower, failed = torch.linalg.cholesky_ex(backwards)
    # what is not finite in a row is not finite on its diagonal
    return lower, (failed == 0) & torch.isfinite(lower.diagonal(dim1=1, dim2=2)).all(1)


def _raise_damping(added: Tensor, failed: Tensor) -> None:
    """Raise, in place, the damping of the heads that failed, tenfold, while there is more to try."""
    if bool((added[failed] >= LAST_EXTRA_DAMPING / 2).any()):
        raise NumericalError(
            f"a matrix cannot be factored even with {LAST_EXTRA_DAMPING:g} times its mean diagonal added"
        )
    added[failed] = torch.where(added[failed] == 0, FIRST_EXTRA_DAMPING, 10 * added[failed])
