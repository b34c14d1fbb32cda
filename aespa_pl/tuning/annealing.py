"""Round softly, and more and more sharply over a training, until every value is next to its integer.

The soft value of v is the mean of its nearest integer and the two beside it, under weights in proportion to
``exp(-k (v - c) ** 2)`` for an integer c. It has a gradient of its own, largest halfway between two integers.

Source: "Soft-to-Hard Vector Quantization for End-to-End Learning Compressible Representations" (arXiv
1704.00648), here with the values of a grid.
"""

from typing import Any

import torch
from torch import Tensor

FIRST, LAST = 4.0, 400.0
"""Sharpness k at the first step, and after ``SHARP`` of the steps; its logarithm rises evenly."""
SHARP = 0.95
"""Share of the steps, after which k stays."""


def sharpness_at(step: int, steps: int) -> float:
    """Return k at a step, counted from 0, of so many."""
    return float(FIRST * (LAST / FIRST) ** min(1.0, step / (SHARP * steps)))


def softly_rounded(v: Tensor, sharpness: float, largest: int) -> Tensor:
    """Return the soft values of ``v``; integers are in 0 .. ``largest``."""
    soft: Tensor = _SoftlyRounded.apply(v, sharpness, largest)  # type: ignore[no-untyped-call]
    return soft


class _SoftlyRounded(torch.autograd.Function):
    """Computes the soft values; their derivative is 2 k times the variance of the integers.

    One function, because autograd would keep a dozen tensors of the size of ``v``.
    """

    @staticmethod
    def forward(ctx: Any, v: Tensor, sharpness: float, largest: int) -> Tensor:
        nearest = v.round().clamp_(0, largest)
        away = (v - nearest).clamp_(-0.5, 0.5)  # further only outside of the range
        # weights of the integers above and below in the range, beside 1 for the nearest
        above = away.mul(2 * sharpness).sub_(sharpness).exp_().mul_(nearest < largest)
        below = away.mul_(-2 * sharpness).sub_(sharpness).exp_().mul_(nearest > 0)
        offset = above - below
        squared = above.add_(below)  # and the sum of all weights but the nearest's
        share = (squared + 1).reciprocal_()
        offset.mul_(share)
        variance = squared.mul_(share).addcmul_(offset, offset, value=-1)
        ctx.sharpness = sharpness
        ctx.save_for_backward(variance)
        return nearest.add_(offset)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (variance,) = ctx.saved_tensors
        return (gradients[0] * variance).mul_(2 * ctx.sharpness), None, None
