"""Do the element-wise work of the soft rounding in kernels that are compiled for an accelerator.

Each kernel reads and writes all of its tensors again, so one kernel does as much as possible. ``adaround.py``
has the same formulas as a loop over chunks, which suits the caches of a CPU.
"""

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
STRETCH = 1.2
"""Width of the stretched sigmoid: it reaches from -0.1 to 1.1 and is cut at 0 and 1 (AdaRound)."""
TINY = 1e-30
"""Its logarithm is finite, and any power of it 0 for all that follows."""


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function for accelerators; on a CPU, and where that is impossible, it runs as it is.

    Its first argument is a tensor, which tells the device. What is no tensor takes few values, because the
    function is compiled for each.
    """

    @wraps(function)
    def call(*arguments: P.args, **more: P.kwargs) -> R:
        first = arguments[0]
        if not isinstance(first, Tensor) or first.device.type == "cpu" or function in _plain:
            return function(*arguments, **more)
        try:
            kernel: Callable[P, R] = compiled(function)
            return kernel(*arguments, **more)
        except torch.OutOfMemoryError:
            raise
        # The compiler has exceptions of its own, and raises them before anything is computed.
        except Exception as error:  # noqa: BLE001
            log.warning("torch.compile can't be used here, so learning is slower: %s", error)
            _plain.add(function)
            return function(*arguments, **more)

    return call


_plain = set[Callable[..., object]]()
"""Functions that could not be compiled."""


@cache
def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return the compiled function; its first call compiles it."""
    # dynamic: one kernel for the shapes of all projections
    return torch.compile(function, fullgraph=True, dynamic=True)


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
