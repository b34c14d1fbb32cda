"""Learn by forward passes whether each weight is rounded up or down, and nothing else (soft rounding).

Notation as in ``parametrization.py``; B rounding variables, h(B) between 0 (down) and 1 (up).

Source: "BRECQ: Pushing the Limit of Post-Training Quantization by Block Reconstruction" (arXiv
2102.05426); "Up or Down? Adaptive Rounding for Post-Training Quantization" (arXiv 2004.10568: h and its
penalty).
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from aespa_pl.algorithm.adaround import penalty_exponent, rectified_sigmoid, rounding_variables
from aespa_pl.algorithm.quantizer import QuantizedWeight, scaled_steps
from aespa_pl.tuning.parametrization import OnGrid, near_integers


class UpOrDown(OnGrid):
    """Learns rounding variables: ``s (clamp(lower + h(B), 0, largest) - z)``.

    Where no gradient is wanted h is 0 or 1, so validation and the result have the decided weight.
    """

    learns_latent = True
    lower: Tensor
    """The integer below each weight, int16; -1 where it lies below the range."""

    def __init__(self, start: QuantizedWeight, target: Tensor) -> None:
        """Start at given integers, which h would be decided for.

        It begins as the place of ``target [rows, d_in]`` between the two next integers.
        """
        super().__init__(start)
        self.log_scale.requires_grad = False
        exact = near_integers(start, target)
        self.register_buffer("lower", exact.floor().to(torch.int16), persistent=False)
        self._start = rounding_variables(exact - self.lower)

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
        variables = rounding_variables_of(module)
        if beta is None or not variables:
            return 0.0
        away = sum((1 - (2 * rectified_sigmoid(B) - 1).abs().pow(beta)).sum() for B in variables)
        return self.weight * cast(Tensor, away) / sum(B.numel() for B in variables)


def rounding_variables_of(module: nn.Module) -> list[nn.Parameter]:
    """Return the rounding variables of all parametrized weights."""
    return [
        cast(nn.Parameter, inner.original)
        for inner in module.modules()
        if isinstance(inner, ParametrizationList) and isinstance(inner[0], UpOrDown)
    ]
