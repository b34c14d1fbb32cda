"""Find AWQ's factor of each column, which follows from the mean absolute value of the input there.

AWQ multiplies a column of weights by ``mean|x| ** alpha`` before rounding and divides it by the same
afterwards, so that the columns of large inputs are rounded finely. zeta divides before rounding, so it is the
inverse.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and
Acceleration" (arXiv 2306.00978), Section 3.2.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from aespa_pl.algorithm.grid import min_max_grid
from aespa_pl.algorithm.objectives import reconstruction_loss
from aespa_pl.algorithm.quantizer import GridFormat, dequantize, quantize

POWERS = 20
"""Powers alpha 0, 1/20 ... 19/20 that are compared."""
LEAST_MAGNITUDE = 1e-4
"""Fraction of the largest mean absolute input that the others count as at least: dead inputs have 0."""


def candidate_zetas(magnitude: Float[Tensor, " d_in"]) -> Float[Tensor, "powers d_in"]:
    """Return zeta for each power alpha of the mean absolute inputs; the first is 1 everywhere.

    The largest and the smallest factor of each are inverse to each other, so the operation that zeta is
    folded into keeps its size.
    """
    tiny = torch.finfo(magnitude.dtype).tiny
    floor = max(tiny, LEAST_MAGNITUDE * float(magnitude.max()))
    log = magnitude.clamp(min=floor).log()
    centred = log - (log.max() + log.min()) / 2
    alpha = torch.arange(POWERS, dtype=log.dtype, device=log.device) / POWERS
    return torch.exp(-alpha[:, None] * centred)


def nearest_loss(
    W: Float[Tensor, "heads rows d_in"],
    H: Float[Tensor, "#heads d_in d_in"],
    zeta: Float[Tensor, " d_in"],
    grid_format: GridFormat,
) -> float:
    """Return ``tr(dW H dW^T)`` of nearest rounding on the min-max grid of ``W / zeta``."""
    grid = min_max_grid(W, zeta, grid_format)
    return float(reconstruction_loss(dequantize(quantize(W, grid), grid) - W, H).sum())
