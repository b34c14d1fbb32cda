"""Do element-wise work in one kernel, because each kernel reads and writes all of its tensors again."""

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function for accelerators; on a CPU, and where that is impossible, it runs as it is.

    Args:
        function: Function of tensors, the first of which tells the device. Its other arguments are few values
            again and again, because it is compiled for each.
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
