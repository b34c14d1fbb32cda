"""Keep memory for intermediate results, and say how much of a tensor to work on at once."""

import torch
from torch import Tensor


class Workspace:
    """Keeps memory for intermediate results from one call to the next.

    New memory costs a CPU more time than the computation in it.
    """

    def __init__(self) -> None:
        """Begin with nothing; a buffer is made when it is first asked for, or too small."""
        self._buffers: dict[str, Tensor] = {}

    def like(self, name: str, tensor: Tensor) -> Tensor:
        """Return the buffer of this name in the shape and type of ``tensor``; it holds anything."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < tensor.numel() or buffer.device != tensor.device:
            buffer = self._buffers[name] = torch.empty_like(tensor).view(-1)
        return buffer[: tensor.numel()].view_as(tensor)


def chunk_elements(tensor: Tensor, *, cpu: int, accelerator: int) -> int:
    """Return how many elements of a tensor to work on at once.

    Each thread of a CPU takes as many as its cache holds, an accelerator as many as its memory allows.
    """
    return cpu * torch.get_num_threads() if tensor.device.type == "cpu" else accelerator
