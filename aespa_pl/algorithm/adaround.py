"""AdaRound on the precomputed objectives: soft rounding, its loss and its closed-form gradient.

Source: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization" (ICML 2020),
with the objectives of aespa (Eq. 25 of the paper).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from aespa_pl.algorithm.objectives import error_product
from aespa_pl.algorithm.quantizer import Grid

STRETCH = 1.2
"""Width of the stretched sigmoid: it reaches from -0.1 to 1.1 and is cut at 0 and 1 (AdaRound)."""


@dataclass(frozen=True)
class SoftRounding:
    """What stays fixed while the rounding of one projection is learned.

    ``clamp(lower + h, 0, levels)`` is either linear in h or does not depend on it, since lower is an
    integer. So the error is ``dW = base + gain * h``, with gain 0 where the clamp holds the weight.
    """

    lower: Float[Tensor, "heads rows d_in"]
    """The integer below each weight, ``floor(W' / step) + zero_point``; may lie outside the range."""
    base: Float[Tensor, "heads rows d_in"]
    """Error of the weight at h = 0, against the original weight W."""
    gain: Float[Tensor, "heads rows d_in"]
    """Step of the weight, or 0."""
    levels: int


@dataclass(frozen=True)
class RoundingLoss:
    """Loss of one projection and its gradient."""

    reconstruction: Float[Tensor, ""]
    penalty: Float[Tensor, ""]
    """The rounding loss, lambda included; 0 during the warm-up."""
    gradient: Float[Tensor, "heads rows d_in"]
    """With respect to the rounding variables, of the sum of both."""


def start(
    W: Float[Tensor, "heads rows d_in"], updated: Float[Tensor, "heads rows d_in"], grid: Grid
) -> tuple[SoftRounding, Float[Tensor, "heads rows d_in"]]:
    """Return the fixed part and the rounding variables B to start from.

    Args:
        W: Original weights: the loss is always measured against them.
        updated: OPTQ's W': it decides which two integers each weight chooses between, and
            ``h(B)`` starts as the fraction of ``W' / step``.
        grid: Grid of the projection.
    """
    step, zero = grid.step(), grid.zero()
    ratio = updated / step
    below = ratio.floor()
    sigmoid = (ratio - below + (STRETCH - 1) / 2) / STRETCH
    lower = below + zero
    base = step * (lower.clamp(0, grid.levels) - zero) - W
    gain = step * ((lower >= 0) & (lower < grid.levels))
    return SoftRounding(lower, base, gain, grid.levels), torch.logit(sigmoid)


def rectified_sigmoid(B: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return ``h(B) = clamp(1.2 sigmoid(B) - 0.1, 0, 1)``."""
    return torch.clamp(STRETCH * torch.sigmoid(B) - (STRETCH - 1) / 2, 0, 1)


def penalty_exponent(
    iteration: int, iterations: int, *, warmup: float, start: float, end: float
) -> float | None:
    """Return beta of the rounding loss, or None while there is none.

    Args:
        iteration: From 0.
        iterations: All iterations.
        warmup: Share of the iterations without rounding loss.
        start: beta right after the warm-up.
        end: beta at the end; it changes linearly.
    """
    first = warmup * iterations
    if iteration < first:
        return None
    return end + (start - end) * max(0.0, 1 - (iteration - first) / (iterations - first))


def rounding_loss(
    B: Float[Tensor, "heads rows d_in"],
    rounding: SoftRounding,
    H: Float[Tensor, "#heads d_in d_in"],
    G: Float[Tensor, "heads rows rows"] | None,
    *,
    weight: float,
    beta: float | None,
) -> RoundingLoss:
    """Return loss and gradient of the soft rounding, with one product ``G dW H`` for both.

    Args:
        B: Rounding variables.
        rounding: Fixed part.
        H: Damped Hessian.
        G: Second moment of the other side (query and key projections), or None.
        weight: lambda, the weight of the rounding loss ``sum(1 - |2 h(B) - 1| ** beta)``.
        beta: Its exponent; None: no rounding loss.
    """
    sigmoid = torch.sigmoid(B)
    stretched = (STRETCH * sigmoid).sub_((STRETCH - 1) / 2)
    h = stretched.clamp(0, 1)
    dW = torch.addcmul(rounding.base, rounding.gain, h)
    P = error_product(dW, H, G)
    reconstruction = _dot(dW, P)
    gradient = P.mul_(rounding.gain).mul_(2)  # d reconstruction / d h
    penalty = torch.zeros_like(reconstruction)
    if beta is not None:
        centred = (2 * h).sub_(1)
        power = centred.abs().pow_(beta - 2).mul_(centred)  # sign(c) |c| ** (beta - 1)
        penalty = weight * (B.numel() - _dot(centred, power))
        gradient.sub_(power, alpha=2 * weight * beta)
    slope = torch.addcmul(sigmoid, sigmoid, sigmoid, value=-1).mul_(STRETCH)
    gradient.mul_(slope).masked_fill_(h != stretched, 0)
    return RoundingLoss(reconstruction, penalty, gradient)


def decide(
    B: Float[Tensor, "heads rows d_in"], rounding: SoftRounding
) -> Float[Tensor, "heads rows d_in"]:
    """Return the integers: h(B) rounded to 0 or 1."""
    up = (rectified_sigmoid(B) >= 0.5).to(B.dtype)
    return (rounding.lower + up).clamp(0, rounding.levels)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.flatten(), b.flatten())
