"""Keep tensors on disk, one at a time in memory: hidden states of segments, statistics of a block."""

import tempfile
import weakref
from collections import UserDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from aespa_pl.storage.files import disk_errors


class BatchesOnDisk:
    """Keeps batches in one file, where they are read and replaced like items of a list.

    The file has no name in its folder: when the process ends, in whatever way, its space is free. A mapping
    of it would count as memory of the process. A disk that is full or not writable is a UserError.
    """

    def __init__(self, folder: Path, batches: Iterable[Tensor] = ()) -> None:
        """Write ``batches``, tensors on the CPU of one type."""
        self._folder = folder
        self._shapes: list[torch.Size] = []
        self._starts = [0]
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed below
        weakref.finalize(self, self._file.close)
        for batch in batches:
            self.append(batch)

    def __len__(self) -> int:
        return len(self._shapes)

    def append(self, batch: Tensor) -> None:
        """Write one more batch."""
        self._dtype = batch.dtype
        self._shapes.append(batch.shape)
        self._starts.append(self._starts[-1] + batch.nbytes)
        self[len(self._shapes) - 1] = batch

    def __getitem__(self, index: int) -> Tensor:
        return self._read(self._starts[index], self._shapes[index])

    def item(self, index: int, place: int) -> Tensor:
        """Read one item of a batch, of its first dimension, and nothing else."""
        shape = self._shapes[index][1:]
        return self._read(self._starts[index] + place * shape.numel() * self._dtype.itemsize, shape)

    def _read(self, start: int, shape: torch.Size) -> Tensor:
        tensor = torch.empty(shape, dtype=self._dtype)
        with disk_errors(self._folder):
            self._file.seek(start)
            self._file.readinto(_bytes(tensor))
        return tensor

    def __setitem__(self, index: int, batch: Tensor) -> None:
        self._shapes[index] = batch.shape  # which may become smaller
        with disk_errors(self._folder):
            self._file.seek(self._starts[index])
            self._file.write(_bytes(batch.contiguous()))
            self._file.flush()


Batches = list[Tensor] | BatchesOnDisk


def item(batches: Batches, index: int, place: int) -> Tensor:
    """Return one item of a batch, of its first dimension, without reading the others."""
    if isinstance(batches, BatchesOnDisk):
        return batches.item(index, place)
    return batches[index][place]


def _bytes(batch: Tensor) -> memoryview:
    return batch.view(-1).view(torch.uint8).numpy().data


class MatricesOnDisk:
    """Keeps a matrix for each head, in a file that is gone with the process, and is read like a tensor."""

    def __init__(self, store: BatchesOnDisk, device: torch.device) -> None:
        """Begin with nothing in a file, which others may write to; what is read goes to ``device``."""
        self._store = store
        self._device = device
        self._places: list[int] = []

    def append(self, matrices: Tensor) -> "MatricesOnDisk":
        """Write the matrices ``[some, rows, columns]`` of the next heads."""
        for matrix in matrices.cpu():
            self._places.append(len(self._store))
            self._store.append(matrix)
        return self

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, heads: slice) -> Tensor:
        return torch.stack([self._store[place] for place in self._places[heads]]).to(self._device)


Matrices = Tensor | MatricesOnDisk
"""Matrices ``[heads, d, d]``, in memory or on disk; both have ``len`` and slices of heads."""


class NamedMatrices(UserDict[str, Any]):
    """Reads one of ``Matrices`` by its name whenever it is asked for, and none where a name is looked for."""

    def __getitem__(self, name: str) -> Tensor:
        return cast(Tensor, self.data[name][:][0])
