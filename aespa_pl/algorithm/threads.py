"""Use fewer threads where an operation is shorter than the wait for another thread."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
