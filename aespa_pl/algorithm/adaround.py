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
    """What stays fixed while the rounding of one projection is learned."""

    lower: Float[Tensor, "heads rows d_in"]
    """The integer below each weight, ``floor(W' / step) + zero_point``; may lie outside the range."""
    step: Float[Tensor, "heads rows d_in"]
    target: Float[Tensor, "heads rows d_in"]
    """``W + step * zero_point``, so that ``dW = step * q - target``; W is the original weight."""
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
    rounding = SoftRounding(below + zero, step, W + step * zero, grid.levels)
    return rounding, torch.logit(sigmoid)


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
    stretched = STRETCH * sigmoid - (STRETCH - 1) / 2
    h = stretched.clamp(0, 1)
    soft = rounding.lower + h
    dW = rounding.step * soft.clamp(0, rounding.levels) - rounding.target
    P = error_product(dW, H, G)
    inside = (soft >= 0) & (soft <= rounding.levels)
    gradient = 2 * P * rounding.step * inside  # d reconstruction / d h
    penalty = dW.new_zeros(())
    if beta is not None:
        centred = 2 * h - 1
        power = centred.abs().pow(beta - 1)
        penalty = weight * (1 - power * centred.abs()).sum()
        gradient = gradient - (2 * weight * beta) * power * centred.sign()
    undecided = (stretched >= 0) & (stretched <= 1)
    gradient = gradient * (STRETCH * sigmoid * (1 - sigmoid)) * undecided
    return RoundingLoss((dW * P).sum(), penalty, gradient)


def decide(
    B: Float[Tensor, "heads rows d_in"], rounding: SoftRounding
) -> Float[Tensor, "heads rows d_in"]:
    """Return the integers: h(B) rounded to 0 or 1."""
    up = (rectified_sigmoid(B) >= 0.5).to(B.dtype)
    return (rounding.lower + up).clamp(0, rounding.levels)
