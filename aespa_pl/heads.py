"""H_V, which has a matrix for each key/value head, on disk instead of in memory."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from aespa_pl.algorithm.hessian import HeadMatrices
from aespa_pl.hidden import BatchesOnDisk


@dataclass(frozen=True)
class HeadsOnDisk(HeadMatrices):
    """Matrices of heads in a file; those of a slice of heads are read to the device."""

    matrices: BatchesOnDisk
    device: torch.device
    diagonals: Tensor | None = None
    """``[heads, d]`` in place of the diagonals in the file, as damping changes them."""

    @classmethod
    def create(cls, folder: Path, device: torch.device) -> "HeadsOnDisk":
        """Make an empty file, which is gone with the process.

        Raises:
            UserError: The folder is not writable.
        """
        return cls(BatchesOnDisk(folder), device)

    def append(self, matrices: Tensor) -> None:
        """Write the matrices ``[some, d, d]`` of the next heads.

        Raises:
            UserError: The disk is full.
        """
        for matrix in matrices.cpu():
            self.matrices.append(matrix)

    @property
    def shape(self) -> torch.Size:
        """Heads, d, d."""
        return torch.Size((len(self.matrices), *self.matrices[0].shape))

    def __getitem__(self, heads: slice) -> Tensor:
        """Read the matrices ``[some, d, d]`` of some heads."""
        chosen = range(len(self.matrices))[heads]
        found = torch.stack([self.matrices[head] for head in chosen]).to(self.device)
        if self.diagonals is not None:
            found.diagonal(dim1=-2, dim2=-1).copy_(self.diagonals[heads])
        return found

    def diagonal(self) -> Tensor:
        """Return the diagonals ``[heads, d]`` in the file."""
        heads = range(len(self.matrices))
        return torch.stack([self.matrices[head].diagonal() for head in heads]).to(self.device)
