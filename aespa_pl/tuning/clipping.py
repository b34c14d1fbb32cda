"""Learn the ranges of the grids: how much of a row's smallest and largest weight is clipped.

Notation as in ``parametrization.py``; beta and gamma strengths between 0 and 1 of the smallest and the
largest weight: ``s = (gamma max W - beta min W) / (2 ** bits - 1)``, ``z = -round(beta min W / s)``.

Source: "OmniQuant: Omnidirectionally Calibrated Quantization for Large Language Models" (arXiv
2308.13137), Eq. 2.
"""

import torch
from torch import Tensor, nn

from aespa_pl.algorithm.grid import min_max_range
from aespa_pl.algorithm.grid_types import round_to_half
from aespa_pl.algorithm.quantizer import QuantizedWeight, scaled_steps
from aespa_pl.tuning.parametrization import WeightParametrization, straight_through

START = 4.0
"""Strengths begin at ``sigmoid(4) = 0.982`` (OmniQuant)."""


class Clipped(WeightParametrization):
    """Learns the strengths of each row and group; every integer is the nearest, with its gradient passed on.

    The weight that is rounded is the original one, under the block's equivalent transformation if there is
    one. Integers and grids that earlier steps have found play no part.
    """

    learns_latent = False

    def __init__(
        self, start: QuantizedWeight, target: Tensor, *, symmetric: bool, transform: nn.Module | None = None
    ) -> None:
        """Start at nearly the min-max grid of ``target``, with bits and groups of ``start``.

        A symmetric grid has its zero point in the middle, and one strength, of the largest absolute weight.
        ``transform`` changes the weight before it is rounded.
        """
        super().__init__()
        self.bits = start.bits
        self.symmetric = symmetric
        self.transform = nn.Identity() if transform is None else transform
        strengths = torch.full((1 if symmetric else 2, *start.scale.shape), START)
        self.strengths = nn.Parameter(strengths.to(target.device))
        self._start = target

    def forward(self, latent: Tensor) -> Tensor:
        """Return the weight of the nearest integers."""
        return scaled_steps(*self._rounded(latent))

    @torch.no_grad()
    def quantized(self, latent: Tensor) -> QuantizedWeight:
        """Return the nearest integers, and the grid."""
        q, scale, zero_point = self._rounded(latent)
        return QuantizedWeight(q.to(torch.uint8), scale, zero_point, self.bits)

    def _rounded(self, latent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return integers ``[rows, d_in]``, and scale and zero point ``[rows, groups]``."""
        W = self.transform(latent).unflatten(1, (self.strengths.shape[-1], -1))
        scale, zero_point = self._grid(W)
        steps = W / scale[..., None]
        q = straight_through(steps.round(), steps) + zero_point[..., None]
        return q.clamp(0, 2**self.bits - 1).flatten(1), scale, zero_point

    def _grid(self, W: Tensor) -> tuple[Tensor, Tensor]:
        largest = 2**self.bits - 1
        low, high = min_max_range(W, symmetric=self.symmetric)
        strengths = self.strengths.sigmoid()
        low, high = strengths[0] * low, strengths[-1] * high
        exact = (high - low) / largest
        scale = straight_through(round_to_half(exact), exact)
        if self.symmetric:
            return scale, torch.full_like(scale, 2 ** (self.bits - 1))
        zero_point = -low / scale
        return scale, straight_through(zero_point.round(), zero_point).clamp(0, largest)
