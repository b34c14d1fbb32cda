"""Multiply matrices in a chosen precision; the sums are always in float32.

bfloat16 has 8 significant bits, TF32 11, float32 24. An accelerator's matrix units multiply the first two
several times as fast as float32. A CPU has no such units: there the operands are rounded and multiplied
in float32, which gives an accelerator's numbers without its speed.

The context decides the precision: ``with multiplying_in("tf32"):``; outside it is float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Precision = Literal["float32", "tf32", "bfloat16"]
TF32_DROPPED_BITS = 13
"""TF32 stores 10 of float32's 23 bits of a significand, so 13 are dropped."""

_current: ContextVar[Precision] = ContextVar("precision", default="float32")


@contextmanager
def multiplying_in(precision: Precision) -> Iterator[None]:
    """Multiply in this precision in this context; the matrix units of an accelerator are set to it."""
    before = torch.get_float32_matmul_precision()
    # a CPU is left alone: it rounds in ``operand``, and newer ones have such units as well
    coarse = precision != "float32" and torch.cuda.is_available()
    torch.set_float32_matmul_precision("high" if coarse else "highest")
    token = _current.set(precision)
    try:
        yield
    finally:
        _current.reset(token)
        torch.set_float32_matmul_precision(before)


def operand(A: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return a float32 matrix as a product in the context's precision wants it."""
    precision = _current.get()
    if precision == "bfloat16":
        rounded = A.to(torch.bfloat16)
        return rounded if A.is_cuda else rounded.float()
    if precision == "tf32" and not A.is_cuda:
        bits = A.view(torch.int32) + (1 << (TF32_DROPPED_BITS - 1))
        return (
            bits.bitwise_right_shift_(TF32_DROPPED_BITS)
            .bitwise_left_shift_(TF32_DROPPED_BITS)
            .view(torch.float32)
        )
    return A


def multiply(
    A: Float[Tensor, "*batch m k"],
    B: Float[Tensor, "*batch k n"],
    *,
    out: Tensor | None = None,
) -> Float[Tensor, "*batch m n"]:
    """Return ``A B`` in float32, of two matrices or two batches of them, in the context's precision.

    Args:
        A: First factor, in float32.
        B: Second factor, an ``operand`` in the same precision.
        out: Memory that receives the product; None: new memory.
    """
    product = torch.mm if A.dim() == 2 else torch.bmm
    A = operand(A)
    if A.dtype == torch.bfloat16:
        return product(A, B, out_dtype=torch.float32, out=out)
    return product(A, B, out=out)
