"""Compute the reconstruction losses of one projection, and their gradients, in a chosen precision.

Every loss is a quadratic form of ``dW``: the product that the gradient needs is also the loss,
``loss = sum(dW * P)`` and ``d loss / d dW = 2 P``. Autograd would take three products a step.

The context decides the precision of products, ``with multiplying_in("tf32"):``; outside it is float32. Sums
are always in float32. bfloat16 has 8 significant bits, TF32 11, float32 24. An accelerator's matrix units
multiply the first two several times as fast. So do those of a CPU (AMX) with bfloat16; another CPU multiplies
in float32 what was rounded.

Source: Eq. 17 (value), 21 and 22 (query, key); Table 4 of the paper.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from jaxtyping import Float, Real
from torch import Tensor

Precision = Literal["float32", "tf32", "bfloat16"]

OF_TORCH = {"float32": "highest", "tf32": "high", "bfloat16": "medium"}
"""torch's names for products of float32 matrices, which it rounds where a device has matrix units."""

_current: ContextVar[Precision] = ContextVar("precision", default="float32")


@contextmanager
def multiplying_in(precision: Precision) -> Iterator[None]:
    """Multiply in this precision in this context, modules such as a model's blocks as well."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(OF_TORCH[precision])
    token = _current.set(precision)
    try:
        yield
    finally:
        _current.reset(token)
        torch.set_float32_matmul_precision(before)


def operand(A: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return a float32 matrix as a product in the context's precision wants it."""
    if _current.get() != "bfloat16":
        return A
    rounded = A.to(torch.bfloat16)
    # torch has no product of bfloat16 matrices with a float32 sum for a CPU
    return rounded.float() if A.device.type == "cpu" else rounded


def multiply(
    A: Float[Tensor, "*batch m k"], B: Float[Tensor, "*batch k n"], *, out: Tensor | None = None
) -> Float[Tensor, "*batch m n"]:
    """Return ``A B`` in float32, of two matrices or two batches of them, in the context's precision.

    A is in float32, B an ``operand`` in the same precision.
    """
    product = torch.mm if A.dim() == 2 else torch.bmm
    A = operand(A)
    if A.dtype == torch.bfloat16:
        return product(A, B, out_dtype=torch.float32, out=out)
    return product(A, B, out=out)


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
    return loss_of(dW, error_product(dW, H, G), coupled=G is not None)


def loss_of(
    dW: Float[Tensor, "heads rows d_in"], product: Float[Tensor, "heads rows d_in"], *, coupled: bool
) -> Float[Tensor, "heads separable"]:
    """Return the reconstruction loss from its ``error_product``, where rows are ``coupled`` by G or not."""
    parts = (dW * product).sum(-1)  # [heads, rows]
    return parts.sum(-1, keepdim=True) if coupled else parts


def keep_better(
    integers: Real[Tensor, "heads rows d_in"],
    loss: Float[Tensor, "heads separable"],
    other_integers: Real[Tensor, "heads rows d_in"],
    other_loss: Float[Tensor, "heads separable"],
) -> Real[Tensor, "heads rows d_in"]:
    """Return, for each independent part of the loss, the integers with the lower loss."""
    return torch.where((other_loss < loss)[..., None], other_integers, integers)
