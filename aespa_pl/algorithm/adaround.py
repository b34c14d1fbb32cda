"""Run AdaRound on the precomputed objectives: soft rounding, its loss and its closed-form gradient.

The element-wise work is a loop over chunks for the caches of a CPU, and in compiled kernels for accelerators.

Source: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization" (ICML 2020),
with the objectives of aespa (Eq. 27 and 28 of the paper).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from aespa_pl.algorithm.grid_types import neighbours
from aespa_pl.algorithm.objectives import error_product, multiply, operand
from aespa_pl.algorithm.quantizer import Grid, split_zero
from aespa_pl.algorithm.workspace import Workspace, chunk_elements, fused

STRETCH = 1.2
"""Width of the stretched sigmoid: it reaches from -0.1 to 1.1 and is cut at 0 and 1 (AdaRound)."""
TINY = 1e-30
"""Its logarithm is finite, and any power of it 0 for all that follows."""
CPU_CHUNK = 2**16
"""Elements for each thread; 2**15 to 2**17 were the fastest of 2**12 to 2**24."""


@dataclass(frozen=True)
class SoftRounding:
    """Holds everything that stays fixed while the rounding of one projection is learned.

    ``clamp(lower + h, 0, largest)`` is either linear in h or does not depend on it, since lower is an
    integer. So the error is ``dW = base + gain * h``, with gain 0 where the clamp holds the weight.
    """

    lower: Int[Tensor, "heads rows d_in"]
    """``floor(W' / step) + zero_point``, the integer below each weight, int16; clamped to -1 and
    ``largest``."""
    base: Float[Tensor, "heads rows d_in"]
    """Error of the weight at h = 0, against the original weight W."""
    gain: Float[Tensor, "heads rows d_in"] | None
    """Step from the lower integer to the one above, or 0. None on an accelerator: there a kernel makes it of
    ``lower`` and the two factors of the step, because reading it would take longer."""
    scale: Float[Tensor, "heads rows groups"]
    zeta: Float[Tensor, " d_in"]
    """The step of a weight is the scale of its group times the zeta of its column."""
    largest: int
    above: Int[Tensor, "heads rows d_in"] | None = None
    """Integer above each weight, int16, where it isn't ``lower + 1``; there is a gain then."""

    def kernel_arguments(self) -> dict[str, Any]:
        """Return what the two kernels make the gain of."""
        return {name: getattr(self, name) for name in ("lower", "scale", "zeta", "largest")}


@dataclass(frozen=True)
class RoundingLoss:
    """Holds the loss of one projection, and its gradient."""

    reconstruction: Float[Tensor, ""]
    penalty: Float[Tensor, ""]
    """The rounding loss, lambda included; 0 during the warm-up."""
    gradient: Float[Tensor, "heads rows d_in"]
    """Gradient of the sum of both losses with respect to the rounding variables."""


def start(
    W: Float[Tensor, "heads rows d_in"], updated: Float[Tensor, "heads rows d_in"], grid: Grid
) -> tuple[SoftRounding, Float[Tensor, "heads rows d_in"]]:
    """Return the fixed part and the rounding variables B to start from.

    The loss is measured against the original weights W. OPTQ's W' (``updated``) decides which two integers
    each weight chooses between, and ``h(B)`` starts as the fraction of ``W' / step``.
    """
    step, zero = grid.step(), grid.zero()
    whole, rest = split_zero(zero)
    ratio = updated / step + rest
    if grid.levels is None:
        below, above = ratio.floor(), None
        lower, fraction = (below + whole).clamp_(-1, grid.largest), ratio - below
    else:
        value = ratio + whole
        lower, above = neighbours(value, grid.levels)
        fraction = ((value - lower) / (above - lower)).clamp_(0, 1)
    base = step * (lower.clamp(0, grid.largest) - zero) - W
    fixed = (grid.scale, grid.zeta, grid.largest)
    gain = None
    if above is not None:
        gain = weight_gain(lower, *fixed) * (above - lower)
        above = above.to(torch.int16)
    elif W.device.type == "cpu":
        gain = weight_gain(lower, *fixed)
    return SoftRounding(lower.to(torch.int16), base, gain, *fixed, above), rounding_variables(fraction)


def rounding_variables(fraction: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return the B with ``h(B) = fraction``, for fractions from 0 to 1."""
    return torch.logit((fraction + (STRETCH - 1) / 2) / STRETCH)


def rectified_sigmoid(B: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return ``h(B) = clamp(1.2 sigmoid(B) - 0.1, 0, 1)``."""
    return torch.clamp(STRETCH * torch.sigmoid(B) - (STRETCH - 1) / 2, 0, 1)


def undecided(B: Float[Tensor, "..."], margin: float = 0.1) -> Float[Tensor, ""]:
    """Return the fraction of the rounding variables whose h(B) is not within ``margin`` of 0 or 1."""
    edge = math.log((STRETCH / 2 + 0.5 - margin) / (STRETCH / 2 - 0.5 + margin))  # h(edge) = 1 - margin
    return (B.abs() < edge).count_nonzero() / B.numel()


def penalty_exponent(
    iteration: int, iterations: int, *, warmup: float, start: float, end: float
) -> float | None:
    """Return beta: None in the ``warmup`` part of the iterations, then linear from ``start`` to ``end``."""
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
    workspace: Workspace | None = None,
    gradient: Tensor | None = None,
) -> RoundingLoss:
    """Return loss and gradient of the soft rounding, with one product ``G dW H`` for both.

    B is contiguous, H an ``operand``. The rounding loss ``lambda sum(1 - |2 h(B) - 1| ** beta)`` has the
    ``weight`` lambda; there is none where beta is None. The gradient is written to ``gradient``.
    """
    workspace = Workspace() if workspace is None else workspace
    gradient = torch.empty_like(B) if gradient is None else gradient
    dW = workspace.like("error", B)
    chunks = []
    if rounding.gain is None:
        soft_error(B, rounding.base, **rounding.kernel_arguments(), out=dW)
    else:
        chunks = _error_in_chunks((B, rounding.base, rounding.gain, dW, gradient), workspace)
    if G is None:
        error_product(dW, H, out=gradient)
    else:
        multiply(G, operand(error_product(dW, H, out=workspace.like("product", dW))), out=gradient)
    if rounding.gain is None:
        reconstruction = torch.dot(dW.view(-1), gradient.view(-1))
        # a tensor, because a kernel is compiled for each value of a number, and for None
        exponent, push = B.new_full((), beta or 2), weight if beta else 0.0
        penalty = soft_penalty(B, exponent) if beta else B.new_zeros(())
        soft_gradient(B, **rounding.kernel_arguments(), exponent=exponent, weight=push, gradient=gradient)
    else:
        reconstruction, penalty = _gradient_in_chunks(chunks, weight, beta, workspace)
    if beta is not None:
        penalty = weight * (penalty + B.numel())
    return RoundingLoss(reconstruction, penalty, gradient)


def _error_in_chunks(tensors: tuple[Tensor, ...], workspace: Workspace) -> list[tuple[Tensor, ...]]:
    """Write the error ``base + gain h(B)``; return the tensors in parts that stay in a processor's cache."""
    size = chunk_elements(tensors[0], cpu=CPU_CHUNK, accelerator=max(1, tensors[0].numel()))
    chunks = list(zip(*(x.view(-1).split(size) for x in tensors), strict=True))
    for b, base, gain, error, _ in chunks:
        h = workspace.like("h", b)
        torch.sigmoid(b, out=h).mul_(STRETCH).sub_((STRETCH - 1) / 2).clamp_(0, 1)
        torch.addcmul(base, gain, h, out=error)
    return chunks


def _gradient_in_chunks(
    chunks: list[tuple[Tensor, ...]], weight: float, beta: float | None, workspace: Workspace
) -> tuple[Tensor, Tensor]:
    """Turn ``G dW H``, half of d reconstruction / d dW, into the gradient. Return loss, ``soft_penalty``."""
    reconstruction, penalty = (chunks[0][0].new_zeros(()) for _ in range(2))
    for b, _, gain, error, g in chunks:
        reconstruction += torch.dot(error, g)
        g.mul_(gain)  # half of d reconstruction / d h
        sigmoid, centred = workspace.like("sigmoid", b), workspace.like("centred", b)
        torch.sigmoid(b, out=sigmoid)
        torch.mul(sigmoid, 2 * STRETCH, out=centred).sub_(STRETCH)  # 2 h - 1 before the clamp
        if beta is not None:
            cut, power = workspace.like("h", b), workspace.like("power", b)
            torch.clamp(centred, -1, 1, out=cut)
            # sign(c) |c| ** (beta - 1); the logarithm's way takes half the time of a power
            torch.abs(cut, out=power).clamp_(min=TINY).log2_().mul_(beta - 2).exp2_().mul_(cut)
            penalty -= torch.dot(cut, power)
            g.sub_(power, alpha=weight * beta)
        # The clamp passes no gradient on; d h / d B = 1.2 s (1 - s) elsewhere.
        torch.ops.aten.hardtanh_backward.grad_input(g, centred, -1, 1, grad_input=g)
        torch.ops.aten.sigmoid_backward.grad_input(g, sigmoid, grad_input=g)
        g.mul_(2 * STRETCH)
    return reconstruction, penalty


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
    out.copy_(base + weight_gain(lower, scale, zeta, largest) * rectified_sigmoid(B))


@fused
def soft_penalty(B: Float[Tensor, "heads rows d_in"], exponent: Float[Tensor, ""]) -> Float[Tensor, ""]:
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


def decide(B: Float[Tensor, "heads rows d_in"], rounding: SoftRounding) -> UInt8[Tensor, "heads rows d_in"]:
    """Return the integers: h(B) rounded to 0 or 1, and h is 0.5 at 0."""
    lower, above = rounding.lower, rounding.above
    chosen = lower + (B >= 0) if above is None else torch.where(B >= 0, above, lower)
    return chosen.clamp_(0, rounding.largest).to(torch.uint8)
