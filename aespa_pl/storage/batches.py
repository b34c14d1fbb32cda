"""Keep tensors of one kind on disk, one at a time in memory: hidden states of segments, H_V of heads."""

import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from aespa_pl.storage.files import disk_errors


class BatchesOnDisk:
    """Keeps batches in one file, where they are read and replaced like items of a list.

    The file has no name in its folder: when the process ends, in whatever way, its space is free. Batches are
    read and written whole; a mapping of the file would count as memory of the process. A disk that is full or
    not writable is a UserError.
    """

    def __init__(self, folder: Path, batches: Iterable[Tensor] = ()) -> None:
        """Write ``batches``, tensors on the CPU; all but the last have the same shape."""
        self._folder = folder
        self._shapes: list[torch.Size] = []
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed below
        weakref.finalize(self, self._file.close)
        for batch in batches:
            self.append(batch)

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._shapes)

    def append(self, batch: Tensor) -> None:
        """Write one more batch."""
        self._dtype = batch.dtype
        self._shapes.append(batch.shape)
        self[len(self._shapes) - 1] = batch

    def __getitem__(self, index: int) -> Tensor:
        """Read a batch; the tensor is the caller's. Raises IndexError where there is none."""
        return self._read(self._start(index), self._shapes[index])

    def item(self, index: int, place: int) -> Tensor:
        """Read one item of a batch, of its first dimension, and nothing else."""
        shape = self._shapes[index][1:]
        return self._read(self._start(index) + place * shape.numel() * self._dtype.itemsize, shape)

    def _read(self, start: int, shape: torch.Size) -> Tensor:
        tensor = torch.empty(shape, dtype=self._dtype)
        with disk_errors(self._folder):
            self._file.seek(start)
            self._file.readinto(_bytes(tensor))
        return tensor

    def __setitem__(self, index: int, batch: Tensor) -> None:
        """Replace a batch by another of its shape and type."""
        with disk_errors(self._folder):
            self._file.seek(self._start(index))
            self._file.write(_bytes(batch.contiguous()))
            self._file.flush()

    def _start(self, index: int) -> int:
        return index * self._shapes[0].numel() * self._dtype.itemsize


Batches = list[Tensor] | BatchesOnDisk


def item(batches: Batches, index: int, place: int) -> Tensor:
    """Return one item of a batch, of its first dimension, without reading the others."""
    if isinstance(batches, BatchesOnDisk):
        return batches.item(index, place)
    return batches[index][place]


def _bytes(batch: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return batch.view(-1).view(torch.uint8).numpy().data


class MatricesOnDisk:
    """Keeps a matrix for each head, in a file that is gone with the process, and is read like a tensor."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Make an empty file in ``folder``; matrices that are read go to ``device``."""
        self._matrices = BatchesOnDisk(folder)
        self._device = device

    def append(self, matrices: Tensor) -> None:
        """Write the matrices ``[some, d, d]`` of the next heads."""
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
