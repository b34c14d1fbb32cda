"""Do the element-wise work of the soft rounding in kernels that are compiled for an accelerator.

``adaround.py`` has the same formulas as a loop over chunks, which suits the caches of a CPU.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from aespa_pl.algorithm.fusion import fused

STRETCH = 1.2
"""Width of the stretched sigmoid: it reaches from -0.1 to 1.1 and is cut at 0 and 1 (AdaRound)."""
TINY = 1e-30
"""Its logarithm is finite, and any power of it 0 for all that follows."""


def weight_gain(lower: Tensor, scale: Tensor, zeta: Tensor, largest: int) -> Tensor:
    """Return ``scale zeta`` of each weight, and 0 where the clamp holds it.

    The scales are ``[heads, rows, groups]``, zeta ``[d_in]``, and ``lower`` has the shape of the result.
    """
    step = (scale[..., None] * zeta.view(scale.shape[-1], -1)).flatten(-2)
    return step * ((lower >= 0) & (lower < largest))


@fused
def soft_error(
    B: Float[Tensor, "heads rows d_in"],
    base: Float[Tensor, "heads rows d_in"],
    *,
    lower: Int[Tensor, "heads rows d_in"],
    scale: Float[Tensor, "heads rows groups"],
    zeta: Float[Tensor, " d_in"],
    largest: int,
    out: Float[Tensor, "heads rows d_in"],
) -> None:
    """Write the error ``dW`` of the soft rounding to ``out``."""
    h = (STRETCH * torch.sigmoid(B) - (STRETCH - 1) / 2).clamp(0, 1)
    out.copy_(base + weight_gain(lower, scale, zeta, largest) * h)


@fused
def soft_penalty(
    B: Float[Tensor, "heads rows d_in"], exponent: Float[Tensor, ""]
) -> Float[Tensor, ""]:
    """Return ``-sum(|2 h(B) - 1| ** exponent)``: the penalty over its weight less the number of weights."""
    centred = (2 * STRETCH * torch.sigmoid(B) - STRETCH).clamp(-1, 1)
    return -centred.abs().pow(exponent).sum()


@fused
def soft_gradient(
    B: Float[Tensor, "heads rows d_in"],
    *,
    lower: Int[Tensor, "heads rows d_in"],
    scale: Float[Tensor, "heads rows groups"],
    zeta: Float[Tensor, " d_in"],
    largest: int,
    exponent: Float[Tensor, ""],
    weight: float,
    gradient: Float[Tensor, "heads rows d_in"],
) -> None:
    """Turn the product ``G dW H`` in ``gradient`` into the gradient of both losses."""
    sigmoid = torch.sigmoid(B)
    centred = 2 * STRETCH * sigmoid - STRETCH
    g = gradient * weight_gain(lower, scale, zeta, largest)
    cut = centred.clamp(-1, 1)
    power = (cut.abs().clamp(min=TINY).log2() * (exponent - 2)).exp2() * cut
    g = g - weight * exponent * power
    g = torch.where(centred.abs() < 1, g, 0) * (1 - sigmoid) * sigmoid
    gradient.copy_(2 * STRETCH * g)
