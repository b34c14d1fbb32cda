"""Multiply matrices in a chosen precision; the sums are always in float32.

bfloat16 has 8 significant bits, TF32 11, float32 24. An accelerator's matrix units multiply the first two
several times as fast as float32. A CPU multiplies in float32, after it has rounded to bfloat16 where that is
asked for.

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

_current: ContextVar[Precision] = ContextVar("precision", default="float32")


@contextmanager
def multiplying_in(precision: Precision) -> Iterator[None]:
    """Multiply in this precision in this context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
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
