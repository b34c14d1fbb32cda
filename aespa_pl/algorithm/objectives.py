"""Compute the reconstruction losses of one projection, and their gradients.

Every loss is a quadratic form of ``dW``: the product that the gradient needs is also the loss,
``loss = sum(dW * P)`` and ``d loss / d dW = 2 P``. Autograd would take three products a step.

Source: Eq. 17 (value), 21 and 22 (query, key); Table 4 of the paper.
"""

import torch
from jaxtyping import Float, Real
from torch import Tensor

from aespa_pl.algorithm.products import multiply, operand


def error_product(
    dW: Float[Tensor, "heads rows d_in"],
    H: Float[Tensor, "#heads d_in d_in"],
    G: Float[Tensor, "heads rows rows"] | None = None,
    *,
    out: Tensor | None = None,
) -> Float[Tensor, "heads rows d_in"]:
    """Return ``G dW H``, or ``dW H`` without G.

    H is an ``operand``, one for all heads or one a head (the value projection). Query and key projection have
    a G, of the *other* side of the attention score. ``dW H`` is written to ``out``, which is contiguous.
    """
    if H.shape[0] == 1:  # one large product instead of a batch of small ones
        flat = None if out is None else out.view(-1, out.shape[-1])
        P = multiply(dW.flatten(0, 1), H[0], out=flat).view_as(dW)
    else:
        P = multiply(dW, H, out=out)
    return P if G is None else multiply(G, operand(P))


def reconstruction_loss(
    dW: Float[Tensor, "heads rows d_in"],
    H: Float[Tensor, "#heads d_in d_in"],
    G: Float[Tensor, "heads rows rows"] | None = None,
) -> Float[Tensor, "heads separable"]:
    """Return ``tr(G dW H dW^T)`` in its independent parts: rows, or with G, which couples rows, heads."""
    parts = (dW * error_product(dW, H, G)).sum(-1)  # [heads, rows]
    return parts if G is None else parts.sum(-1, keepdim=True)


def keep_better(
    integers: Real[Tensor, "heads rows d_in"],
    loss: Float[Tensor, "heads separable"],
    other_integers: Real[Tensor, "heads rows d_in"],
    other_loss: Float[Tensor, "heads separable"],
) -> Real[Tensor, "heads rows d_in"]:
    """Return, for each independent part of the loss, the integers with the lower loss."""
    return torch.where((other_loss < loss)[..., None], other_integers, integers)
