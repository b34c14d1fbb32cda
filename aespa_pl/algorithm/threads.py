"""Use fewer threads where an operation is shorter than the wait for another thread, else always the same."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def keep_threads() -> None:
    """Set the number of threads to what it is, so that what follows has the same bits in any process.

    The first call of ``torch.set_num_threads``, with whatever number, also changes how the library of matrix
    products chooses its threads. After it the gradient of torch's attention has other last bits (seen with
    two threads). A run that is resumed behind the first ``one_thread`` would end with other integers than one
    that was never stopped.
    """
    torch.set_num_threads(torch.get_num_threads())


@contextmanager
def one_thread(*, where: bool) -> Iterator[None]:
    """Let torch's operations on the CPU use one thread within the block, if ``where`` is true.

    The number of threads that torch had comes back afterwards, also after an error.
    """
    threads = torch.get_num_threads()
    if not where or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
