"""Define what is learned of a weight, as parametrizations for ``torch.nn.utils.parametrize``.

A ``WeightParametrization`` makes the weight of a linear layer from its parameters, and says which
integers and which grid the weight stands for. Further ones are in ``rounding.py`` and ``clipping.py``. The
training knows them by this interface alone; the transformations of ``equivalent.py`` have a learning rate of
their own, and it tells them the epoch.

Notation: q integers, s scale, z zero point, ``W_hat = s (q - z)``, v latent values, ``q = round(v)``.

Source: "Estimating or Propagating Gradients Through Stochastic Neurons for Conditional Computation"
(arXiv 1308.3432: the straight-through gradient); "Learned Step Size Quantization" (arXiv 1902.08153: scales
that are learned with it).
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from aespa_pl.algorithm.grid_types import round_to_half
from aespa_pl.algorithm.quantizer import QuantizedWeight, StoredWeight, scaled_steps
from aespa_pl.tuning.annealing import softly_rounded

MARGIN = 0.49
"""Largest distance of a latent value from its integer at the start: it rounds to that integer."""


class WeightParametrization(nn.Module, ABC):
    """Makes a weight from its latent values and from the parameters of this module.

    torch calls ``right_inverse`` once, registers what it returns as the parameter
    ``parametrizations.weight.original``, and hands this to ``forward`` whenever the weight is read.
    """

    learns_latent: ClassVar[bool]
    """Whether the latent values are trained; otherwise they stay."""
    bits: int
    """Bits of the integers."""
    sharpness: float | None = None
    """How sharply latent values are rounded where a gradient is wanted (``annealing.py``); None: to the
    nearest integer, with the gradient of the identity."""
    _start: Tensor
    """Latent values at the start; empty once torch has registered them, because once is enough in memory."""

    @abstractmethod
    def forward(self, latent: Tensor) -> Tensor:
        """Return the weight ``[rows, d_in]``."""

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the latent values at the start of the training; ``weight`` tells type and device."""
        start, self._start = self._start, torch.empty(0)
        return start.to(weight)

    @abstractmethod
    def quantized(self, latent: Tensor) -> StoredWeight:
        """Return the integers and the grid that the weight stands for."""


class OnGrid(WeightParametrization):
    """Has the logarithms of scales as parameters; the zero points stay."""

    zero_point: Tensor
    """Integers ``[rows, groups]`` that stand for 0."""

    def __init__(self, start: QuantizedWeight) -> None:
        """Start at the grid of a quantized weight."""
        super().__init__()
        self.bits = start.bits
        self.log_scale = nn.Parameter(start.scale.float().log())
        self.register_buffer("zero_point", start.zero_point.float(), persistent=False)

    def _scale(self) -> Tensor:
        """Return scales that float16 holds, in every forward pass, because they are stored in it."""
        scale = self.log_scale.exp()
        return straight_through(round_to_half(scale), scale)


class StraightThrough(OnGrid):
    """Learns integers and scales: rounds the latent values, with a straight-through gradient."""

    learns_latent = True

    def __init__(self, start: QuantizedWeight, target: Tensor) -> None:
        """Start at given integers; ``target`` tells how near each latent value is to the next."""
        super().__init__(start)
        self._start = near_integers(start, target)

    def forward(self, latent: Tensor) -> Tensor:
        """Return the weight of the nearest integers; autograd knows it as differentiable."""
        return dequantized(latent, self._scale(), self.zero_point, 2**self.bits - 1, self.sharpness)

    @torch.no_grad()
    def quantized(self, latent: Tensor) -> QuantizedWeight:
        """Return the nearest integers and the scales."""
        integers = latent.round().clamp_(0, 2**self.bits - 1).to(torch.uint8)
        return QuantizedWeight(integers, self._scale(), self.zero_point, self.bits)


class FixedIntegers(OnGrid):
    """Learns scales; the latent values are ``q - z``, and stay."""

    learns_latent = False

    def __init__(self, start: QuantizedWeight) -> None:
        """Start at a quantized weight."""
        super().__init__(start)
        self._start = start.integers - start.each_column(start.zero_point)

    def forward(self, latent: Tensor) -> Tensor:
        """Return the weight."""
        scale = self._scale()[..., None]  # [rows, groups, 1]
        steps: Tensor = latent.unflatten(1, (scale.shape[1], -1))
        return (scale * steps).flatten(1)

    @torch.no_grad()
    def quantized(self, latent: Tensor) -> QuantizedWeight:
        """Return the integers and the scales that were learned."""
        columns = latent.shape[1] // self.zero_point.shape[1]
        integers = (latent + self.zero_point.repeat_interleave(columns, dim=1)).to(torch.uint8)
        return QuantizedWeight(integers, self._scale(), self.zero_point, self.bits)


def near_integers(start: QuantizedWeight, target: Tensor) -> Tensor:
    """Return what the integers of a weight, which stands for ``target [rows, d_in]``, are rounded from."""
    steps = target.float() / start.each_column(start.scale)
    offset = steps + start.each_column(start.zero_point) - start.integers
    return start.integers + offset.clamp_(-MARGIN, MARGIN)


class Stored(nn.Module):
    """Rounds a parameter to the type that it is stored in, with a straight-through gradient.

    The error of an epoch is then the error of the model on disk.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Round to ``dtype``."""
        super().__init__()
        self.dtype = dtype

    def forward(self, learned: Tensor) -> Tensor:
        """Return the nearest values of the stored type, in the type of ``learned``."""
        return straight_through(learned.to(self.dtype).to(learned), learned)

    def right_inverse(self, value: Tensor) -> Tensor:
        """Return the value itself."""
        return value


def straight_through(rounded: Tensor, value: Tensor) -> Tensor:
    """Return ``rounded`` with the gradient of ``value``.

    The sum is exact: the difference of two numbers within a factor of two has no rounding error.
    """
    return value + (rounded - value).detach()


def dequantized(
    v: Tensor, scale: Tensor, zero_point: Tensor, largest: int, sharpness: float | None = None
) -> Tensor:
    """Return ``s (clamp(round(v), 0, largest) - z)``, where rounding has the gradient of the identity.

    With a sharpness rounding is soft where a gradient is wanted.
    """
    if sharpness is not None and torch.is_grad_enabled():
        return scaled_steps(softly_rounded(v, sharpness, largest), scale, zero_point)
    weight: Tensor = _Dequantized.apply(v, scale, zero_point, largest)  # type: ignore[no-untyped-call]
    return weight


class _Dequantized(torch.autograd.Function):
    """Computes ``s (clamp(round(v), 0, largest) - z)``, where rounding has the gradient of the identity.

    One function, because autograd would keep five tensors of the weight's size for the way back.
    """

    @staticmethod
    def forward(ctx: Any, v: Tensor, scale: Tensor, zero_point: Tensor, largest: int) -> Tensor:
        ctx.largest = largest
        ctx.save_for_backward(v, scale, zero_point)
        q = v.round().clamp_(0, largest)
        steps: Tensor = q.unflatten(1, (scale.shape[1], -1))
        return steps.sub_(zero_point[..., None]).mul_(scale[..., None]).flatten(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        v, scale, zero_point = ctx.saved_tensors
        gradient = gradients[0].unflatten(1, (scale.shape[1], -1))
        nearest = v.round()
        q = nearest.clamp(0, ctx.largest)
        steps = q.unflatten(1, (scale.shape[1], -1)) - zero_point[..., None]
        to_scale = (gradient * steps).sum(-1)
        to_v = (gradient * scale[..., None]).flatten(1).mul_(nearest == q)
        return to_v, to_scale, None, None
