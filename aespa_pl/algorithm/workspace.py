"""Use a processor well: memory that is kept, tensors in chunks, one thread for what is short, and kernels."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


class Workspace(dict[str, Tensor]):
    """Keeps memory for intermediate results: new memory costs a CPU more time than the computation in it."""

    def like(self, name: str, tensor: Tensor) -> Tensor:
        """Return the buffer of this name in the shape and type of ``tensor``; it holds anything."""
        buffer = self.get(name)
        if buffer is None or buffer.numel() < tensor.numel() or buffer.device != tensor.device:
            buffer = self[name] = torch.empty_like(tensor).view(-1)
        return buffer[: tensor.numel()].view_as(tensor)


def chunk_elements(tensor: Tensor, *, cpu: int, accelerator: int) -> int:
    """Return how many elements to work on at once: as many as the caches of a CPU or a memory hold."""
    return cpu * torch.get_num_threads() if tensor.device.type == "cpu" else accelerator


def keep_threads() -> None:
    """Set the number of threads to what it is, so that what follows has the same bits in any process.

    The first call of ``torch.set_num_threads``, with whatever number, also changes how the library of matrix
    products chooses its threads. After it the gradient of torch's attention has other last bits, and a run
    that is resumed behind the first ``one_thread`` would end with other integers than one never stopped.
    """
    torch.set_num_threads(torch.get_num_threads())


@contextmanager
def one_thread(*, where: bool) -> Iterator[None]:
    """Let torch use one thread of the CPU within the block: short operations don't wait for others then."""
    threads = torch.get_num_threads()
    if not where or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def fused(function: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """Compile a function for accelerators; on a CPU, and where that is impossible, it runs as it is.

    Each kernel reads and writes all of its tensors again, so one kernel does as much as possible. What is no
    tensor takes few values, because the function is compiled for each.
    """

    @wraps(function)
    def call(first: Tensor, /, *arguments: P.args, **more: P.kwargs) -> R:
        if first.device.type == "cpu" or function in _plain:
            return function(first, *arguments, **more)
        try:
            kernel: Callable[Concatenate[Tensor, P], R] = compiled(function)
            return kernel(first, *arguments, **more)
        except torch.OutOfMemoryError:
            raise
        # The compiler has exceptions of its own, and raises them before anything is computed.
        except Exception as error:  # noqa: BLE001
            log.warning("torch.compile can't be used here, so learning is slower: %s", error)
            _plain.add(function)
            return function(first, *arguments, **more)

    return call


_plain = set[Callable[..., object]]()
"""Functions that could not be compiled."""


@cache
def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return the compiled function, one for the shapes of all projections; its first call compiles it."""
    return torch.compile(function, fullgraph=True, dynamic=True)
