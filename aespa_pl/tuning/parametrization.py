"""Define what is learned of a weight, as parametrizations for ``torch.nn.utils.parametrize``.

A ``WeightParametrization`` makes the weight of a linear layer from its parameters, and says which
integers and which grid the weight stands for. Further ones are in ``typed.py`` and ``omniquant.py``.

Notation: q integers, s scale, z zero point, ``W_hat = s (q - z)``, v latent values, ``q = round(v)``.

Source: "Estimating or Propagating Gradients Through Stochastic Neurons for Conditional Computation"
(arXiv 1308.3432: the straight-through gradient); "Learned Step Size Quantization" (arXiv 1902.08153: scales
that are learned with it); "Soft-to-Hard Vector Quantization for End-to-End Learning Compressible
Representations" (arXiv 1704.00648: soft rounding that gets sharper); "BRECQ: Pushing the Limit of
Post-Training Quantization by Block Reconstruction" (arXiv 2102.05426) and "Up or Down? Adaptive Rounding for
Post-Training Quantization" (arXiv 2004.10568): h(B) and its penalty.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from aespa_pl.algorithm.adaround import penalty_exponent, rectified_sigmoid, rounding_variables
from aespa_pl.algorithm.grid_types import nearest, round_to_half
from aespa_pl.algorithm.quantizer import QuantizedWeight, StoredWeight, scaled_steps
from aespa_pl.algorithm.workspace import chunk_elements

MARGIN = 0.49
"""Largest distance of a latent value from its integer at the start: it rounds to that integer."""
FIRST_SHARPNESS, LAST_SHARPNESS = 4.0, 400.0
"""Sharpness k at the first step, and after ``SHARP`` of the steps; its logarithm rises evenly."""
CPU_CHUNK = 2**17
"""Numbers that a thread of a CPU works on at once where a gradient needs several tensors of the weight's
size: they stay in the cache, and no memory of that size is asked for and given back."""
SHARP = 0.95
"""Share of the steps, after which k stays."""


class WeightParametrization(nn.Module, ABC):
    """Makes a weight from its latent values and from the parameters of this module.

    torch calls ``right_inverse`` once, registers what it returns as the parameter
    ``parametrizations.weight.original``, and hands this to ``forward`` whenever the weight is read.
    """

    bits: int
    """Bits of the integers."""
    sharpness: float | None = None
    """How sharply latent values are rounded where a gradient is wanted (``softly_rounded``); None, and for
    levels at several distances: to the nearest, with the gradient of the identity."""
    levels: tuple[int, ...] | None = None
    """The integers that there are, where they are not all of ``0 .. 2^bits - 1``; latent values are in their
    mean distances then."""
    _start: Tensor
    """Latent values at the start; empty once torch has registered them, because once is enough in memory."""

    @abstractmethod
    def forward(self, latent: Tensor) -> Tensor:
        """Return the weight ``[rows, d_in]``."""

    def nearest(self, latent: Tensor) -> Tensor:
        """Return the latent values of the nearest integers."""
        return nearest(latent, 2**self.bits - 1)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the latent values at the start of the training; ``weight`` tells type and device."""
        start, self._start = self._start, torch.empty(0)
        return start.to(weight)

    @abstractmethod
    def quantized(self, latent: Tensor) -> StoredWeight:
        """Return the integers and the grid that the weight stands for."""

    def dequantized(self, v: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Return ``s (q - z)`` of the nearest q, where rounding has the gradient of the identity.

        With a sharpness rounding is soft where a gradient is wanted.
        """
        if self.sharpness is not None and self.levels is None and torch.is_grad_enabled():
            return scaled_steps(softly_rounded(v, self.sharpness, 2**self.bits - 1), scale, zero_point)
        weight: Tensor = _Dequantized.apply(v, scale, zero_point, self)  # type: ignore[no-untyped-call]
        return weight


class OnGrid(WeightParametrization):
    """Has the logarithms of scales as parameters; the zero points stay."""

    zero_point: Tensor
    """Integers ``[rows, groups]`` that stand for 0."""

    def __init__(self, start: QuantizedWeight, target: Tensor) -> None:
        """Start at given integers; ``target [rows, d_in]`` says how near each latent value is to the next."""
        super().__init__()
        self.bits = start.bits
        self.log_scale = nn.Parameter(start.scale.float().log())
        self.register_buffer("zero_point", start.zero_point.float(), persistent=False)
        steps = target.float() / start.each_column(start.scale)
        offset = steps + start.each_column(start.zero_point) - start.integers
        self._start = start.integers + offset.clamp_(-MARGIN, MARGIN)

    def _scale(self) -> Tensor:
        """Return scales that float16 holds, in every forward pass, because they are stored in it."""
        scale = self.log_scale.exp()
        return straight_through(round_to_half(scale), scale)


class StraightThrough(OnGrid):
    """Learns integers and scales: rounds the latent values, with a straight-through gradient."""

    def forward(self, latent: Tensor) -> Tensor:
        """Return the weight of the nearest integers; autograd knows it as differentiable."""
        return self.dequantized(latent, self._scale(), self.zero_point)

    @torch.no_grad()
    def quantized(self, latent: Tensor) -> QuantizedWeight:
        """Return the nearest integers and the scales."""
        integers = self.nearest(latent).to(torch.uint8)
        return QuantizedWeight(integers, self._scale(), self.zero_point, self.bits)


class UpOrDown(OnGrid):
    """Learns rounding variables B alone: ``s (clamp(lower + h(B), 0, largest) - z)``.

    h(B) is between 0 (down) and 1 (up). Where no gradient is wanted it is 0 or 1, so validation and the
    result have the decided weight.
    """

    lower: Tensor
    """The integer below each weight, int16; -1 where it lies below the range."""

    def __init__(self, start: QuantizedWeight, target: Tensor) -> None:
        """Start at given integers, with h as the place of ``target [rows, d_in]`` between the next two."""
        super().__init__(start, target)
        self.log_scale.requires_grad = False
        self.register_buffer("lower", self._start.floor().to(torch.int16), persistent=False)
        self._start = rounding_variables(self._start - self.lower)

    def forward(self, latent: Tensor) -> Tensor:
        """Return the soft weight, or the decided one where no gradient is wanted."""
        up = rectified_sigmoid(latent) if torch.is_grad_enabled() else (latent >= 0).float()
        q = (self.lower + up).clamp(0, 2**self.bits - 1)
        return scaled_steps(q, self._scale(), self.zero_point)

    @torch.no_grad()
    def quantized(self, latent: Tensor) -> QuantizedWeight:
        """Return the integers that are decided for."""
        integers = (self.lower + (latent >= 0)).clamp_(0, 2**self.bits - 1).to(torch.uint8)
        return QuantizedWeight(integers, self._scale(), self.zero_point, self.bits)


@dataclass(frozen=True)
class RoundingPenalty:
    """Pushes every h to 0 or 1, more and more sharply."""

    weight: float
    """Weight of the mean over all rounding variables."""
    warmup: float
    """Share of the steps, at the start, without the penalty."""
    beta_start: float
    """Exponent after the warm-up."""
    beta_end: float
    """Exponent at the last step."""

    def of(self, module: nn.Module, step: int, steps: int) -> Tensor | float:
        """Return the mean of ``1 - |2 h(B) - 1| ** beta``, weighted; 0 in the warm-up and without any B."""
        beta = penalty_exponent(step, steps, warmup=self.warmup, start=self.beta_start, end=self.beta_end)
        variables: list[Tensor] = [
            inner.original
            for inner in module.modules()
            if isinstance(inner, ParametrizationList) and isinstance(inner[0], UpOrDown)
        ]
        if beta is None or not variables:
            return 0.0
        away = sum((1 - (2 * rectified_sigmoid(B) - 1).abs().pow(beta)).sum() for B in variables)
        return self.weight * cast(Tensor, away) / sum(B.numel() for B in variables)


class Stored(nn.Module):
    """Rounds a parameter to the type that it is stored in, with a straight-through gradient.

    The error of an epoch is then the error of the model on disk.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, learned: Tensor) -> Tensor:
        """Return the nearest values of the stored type, in the type of ``learned``."""
        return straight_through(learned.to(self.dtype).to(learned), learned)


def straight_through(rounded: Tensor, value: Tensor) -> Tensor:
    """Return ``rounded``, bit for bit, with the gradient of ``value``, which is finite."""
    return rounded.detach() + (value - value.detach())


class _Dequantized(torch.autograd.Function):
    """Computes ``s (nearest(v) - z)``, where rounding has the gradient of the identity within the range.

    One function, because autograd would keep five tensors of the weight's size for the way back.
    """

    @staticmethod
    def forward(
        ctx: Any, v: Tensor, scale: Tensor, zero_point: Tensor, made: WeightParametrization
    ) -> Tensor:
        ctx.made = made
        ctx.save_for_backward(v, scale, zero_point)
        steps: Tensor = made.nearest(v).unflatten(1, (scale.shape[1], -1))
        return steps.sub_(zero_point[..., None]).mul_(scale[..., None]).flatten(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        v, scale, zero_point = ctx.saved_tensors
        to_v, to_scale = torch.empty_like(v) if ctx.needs_input_grad[0] else None, torch.empty_like(scale)
        rows = max(1, chunk_elements(v, cpu=CPU_CHUNK, accelerator=v.numel()) // v.shape[1])
        for first in range(0, len(v), rows):
            part = slice(first, first + rows)
            gradient = gradients[0][part].unflatten(1, (scale.shape[1], -1))
            q = ctx.made.nearest(v[part])
            steps = q.unflatten(1, (scale.shape[1], -1)) - zero_point[part, :, None]
            to_scale[part] = steps.mul_(gradient).sum(-1)
            if to_v is not None:
                product = torch.mul(gradient, scale[part, :, None], out=steps).flatten(1)
                inside = (v[part] >= -0.5) & (v[part] < 2**ctx.made.bits - 0.5)
                torch.mul(product, inside, out=to_v[part])
        return to_v, to_scale, None, None


def sharpness_at(step: int, steps: int) -> float:
    """Return k at a step, counted from 0, of so many."""
    return float(FIRST_SHARPNESS * (LAST_SHARPNESS / FIRST_SHARPNESS) ** min(1.0, step / (SHARP * steps)))


def softly_rounded(v: Tensor, sharpness: float, largest: int) -> Tensor:
    """Return the means of integers in 0 .. ``largest``: the one nearest to v, and the two beside it.

    An integer c has a weight in proportion to ``exp(-k (v - c) ** 2)``, with k the sharpness. The mean has a
    gradient of its own, largest halfway between two integers.
    """
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
