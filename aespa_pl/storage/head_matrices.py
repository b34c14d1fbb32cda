"""H_V, which has a matrix for each key/value head, on disk instead of in memory."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from aespa_pl.algorithm.hessian import HeadMatrices
from aespa_pl.storage.batches import BatchesOnDisk


@dataclass(frozen=True)
class HeadsOnDisk(HeadMatrices):
    """Matrices of heads in a file; those of a slice of heads are read to the device."""

    matrices: BatchesOnDisk
    device: torch.device
    diagonals: Tensor | None = None
    """``[heads, d]`` in place of the diagonals in the file, as damping changes them."""
    chosen: range | None = None
    """Heads in the file that these are; None: all."""

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
        return torch.Size((len(self._heads), *self.matrices[0].shape))

    def __getitem__(self, heads: slice) -> Tensor:
        """Read the matrices ``[some, d, d]`` of some heads."""
        found = torch.stack([self.matrices[head] for head in self._heads[heads]]).to(self.device)
        if self.diagonals is not None:
            found.diagonal(dim1=-2, dim2=-1).copy_(self.diagonals[heads])
        return found

    def only(self, heads: slice) -> "HeadsOnDisk":
        """Return some of the heads, unread."""
        diagonals = None if self.diagonals is None else self.diagonals[heads]
        return replace(self, diagonals=diagonals, chosen=self._heads[heads])

    def diagonal(self) -> Tensor:
        """Return the diagonals ``[heads, d]`` in the file."""
        return torch.stack([self.matrices[h].diagonal() for h in self._heads]).to(self.device)

    @property
    def _heads(self) -> range:
        return range(len(self.matrices)) if self.chosen is None else self.chosen
