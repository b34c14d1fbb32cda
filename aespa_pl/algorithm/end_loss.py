"""Predict the rise of a model's end loss from the rounding errors of one matrix.

With g the gradient of the end loss at the outputs ``y = W x``, of labels drawn from the model's distribution,
the KL divergence rises by ``1/2 E[(g^T dW x)^2]``, which is nearly ``1/2 sum_i E[g_i^2] dW_i H dW_i^T``.

A method that compensates rounding errors leaves less than the dW of nearest rounding. With ``H = L D L^T``,
L unit triangular in the order in which columns are rounded, a row's loss is then ``sum_j D_j e_j^2``, where
the errors e_j are as large as nearest rounding's: D_j is what the later columns can't make up for.

Source: "QuIP: 2-Bit Quantization of Large Language Models With Guarantees" (NeurIPS 2023), Section 3, for
tr(D).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from aespa_pl.algorithm.grid import weighted_grid
from aespa_pl.algorithm.hessian import corrected_weights, damp, remaining_variances
from aespa_pl.algorithm.quantizer import GridFormat, dequantize, quantize


def uncompensated(H: Float[Tensor, "d_in d_in"], damping: float) -> Float[Tensor, " d_in"]:
    """Return D, the variance of each input given those whose columns are rounded after its own.

    H is the inputs' second moment; ``damping``, a share of its mean diagonal, is added to the diagonal.
    """
    damped = H.clone()
    damped.diagonal().copy_(damp(H.diagonal()[None], damping)[0])
    order = damped.diagonal().argsort(descending=True, stable=True)  # of OPTQ
    variances = remaining_variances(damped, order)
    return torch.empty_like(variances).index_copy_(0, order, variances)


def uncorrected(
    W: Float[Tensor, "rows d"], counts: Int[Tensor, " rows"], damping: float, correction: float
) -> Float[Tensor, " rows"]:
    """Return the share of the loss by each row's errors that is left after the next block's correction.

    The rows are an embedding's, and ``counts`` says how often the text has each one's token. With P their
    diagonal and ``H = W^T P W``, damped, a regression on the rows removes the share ``h``, the diagonal of
    ``P W H^-1 W^T`` (leverage). A block that makes up for the part ``correction`` of what it could leaves
    ``1 - h + (1 - correction)^2 h``.
    """
    seen = counts > 0
    rows, left = W[seen].float(), torch.ones(len(W), device=W.device)
    weighted = rows * counts[seen, None]
    H = rows.T @ weighted
    H.diagonal().copy_(damp(H.diagonal()[None], damping)[0])
    solved, _ = corrected_weights(torch.zeros_like(rows)[None], weighted[None], H[None], 1.0)
    left[seen] -= correction * (2 - correction) * (solved[0] * rows).sum(1)
    return left


def row_losses(
    W: Float[Tensor, "rows d_in"], D: Float[Tensor, " d_in"], form: GridFormat
) -> Float[Tensor, "rows d_in"]:
    """Return ``D_j e_j^2`` of each weight, with the errors e of nearest rounding on good grids."""
    grid = weighted_grid(W[None], D, torch.ones_like(D), form)
    errors = dequantize(quantize(W[None], grid), grid)[0] - W
    return errors.square_().mul_(D)


def sampled_rows(mass: Float[Tensor, " rows"], count: int) -> Int[Tensor, " count"]:
    """Return rows at equal distances in the cumulated mass, often the same, for the mean weighted by mass."""
    cumulated = mass.double().cumsum(0)
    places = (torch.arange(count, device=mass.device) + 0.5) / count * cumulated[-1]
    return torch.searchsorted(cumulated, places).clamp_(max=len(mass) - 1)


def predicted(
    W: Float[Tensor, "rows d_in"],
    gradients: Float[Tensor, "rows columns"],
    D: Float[Tensor, " d_in"],
    form: GridFormat,
    count: int,
) -> float:
    """Return the predicted rise of the end loss, in nats per token, for grids of a form.

    W is of any type. The gradients are second moments, of each row (one column) or of each weight. At most
    ``count`` rows are rounded; they stand for all.
    """
    mass = gradients.sum(1)
    if len(W) <= count:
        return 0.5 * float((row_losses(W.float(), D, form) * gradients).sum())
    if not bool(mass.any()):
        return 0.0
    rows, times = sampled_rows(mass, count).unique(return_counts=True)
    shares = gradients[rows] / mass[rows, None] * times[:, None]
    mean = (row_losses(W[rows].float(), D, form) * shares).sum() / count
    return 0.5 * float(mean * mass.sum())
