"""Keep matrices ``[heads, d, d]`` on disk that are too many for memory; a slice of heads is a tensor."""

from pathlib import Path

import torch
from torch import Tensor

from aespa_pl.storage.batches import BatchesOnDisk


class MatricesOnDisk:
    """Keeps a matrix for each head, in a file that is gone with the process, and is read like a tensor."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Make an empty file in ``folder``; matrices that are read go to ``device``.

        Raises:
            UserError: The folder is not writable.
        """
        self._matrices = BatchesOnDisk(folder)
        self._device = device

    def append(self, matrices: Tensor) -> None:
        """Write the matrices ``[some, d, d]`` of the next heads.

        Raises:
            UserError: The disk is full.
        """
        for matrix in matrices.cpu():
            self._matrices.append(matrix)

    def __len__(self) -> int:
        """Return the number of heads."""
        return len(self._matrices)

    def __getitem__(self, heads: slice) -> Tensor:
        """Read the matrices ``[some, d, d]`` of some heads."""
        chosen = range(len(self))[heads]
        return torch.stack([self._matrices[head] for head in chosen]).to(self._device)


Matrices = Tensor | MatricesOnDisk
"""Matrices ``[heads, d, d]``, in memory or on disk; both have ``len`` and slices of heads."""
