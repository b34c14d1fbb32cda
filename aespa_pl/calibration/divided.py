"""Put the statistics together that several passes over the segments have taken, each of another part."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from aespa_pl.calibration.hessian import Hessian
from aespa_pl.calibration.statistics import BlockStatistics, Reached, Shifts
from aespa_pl.models.family import BlockLayout
from aespa_pl.storage.batches import BatchesOnDisk, Matrices, MatricesOnDisk, NamedMatrices


class DividedStatistics:
    """Joins parts of the statistics of one block; the matrices that are divided wait on disk."""

    def __init__(
        self, layout: BlockLayout, folder: Path, device: torch.device, *, heads: bool, experts: bool
    ) -> None:
        """Begin with nothing in a file of the ``folder``; ``heads`` and ``experts`` say what is divided."""
        self._store, self._device = BatchesOnDisk(folder), device
        self._values = MatricesOnDisk(self._store, device) if heads else None
        inputs = (item for group in layout.groups for item in group.inputs.items())
        self._on_disk = {name for name, (first, *_) in inputs if experts and first.expert is not None}
        self._first: BlockStatistics | None = None
        self._inputs: dict[str, Hessian] = {}
        self._shifts: tuple[dict[str, Matrices], dict[str, Matrices]] = ({}, {})
        self._attended_shifts: list[Tensor] = []
        self._magnitudes: dict[str, Tensor] = {}
        self._reached: dict[str, Reached] = {}

    def add(self, found: BlockStatistics) -> None:
        """Take what a pass has found."""
        inputs = self._kept({name: hessian[:] for name, hessian in found.inputs.items()})
        self._inputs |= {name: Hessian(matrices) for name, matrices in inputs.items()}
        if found.shifts is not None:
            for kept, shifts in zip(self._shifts, (found.shifts.inputs, found.shifts.outputs), strict=True):
                kept.update(self._kept({name: shift[None] for name, shift in shifts.items()}))
            self._attended_shifts += [] if found.shifts.attended is None else [found.shifts.attended]
        self._magnitudes |= found.magnitudes
        self._reached |= found.reached
        if self._values is not None and found.attended is not None:
            self._values.append(found.attended[:])
            found = replace(found, attended=None)
        self._first = self._first or replace(found, inputs={}, shifts=found.shifts and Shifts())

    def joined(self) -> BlockStatistics:
        """Return the statistics of all parts, of which there is one at least."""
        first = self._first
        if first is None:
            raise ValueError("no pass was made")
        shifts = first.shifts
        if shifts is not None:
            attended = torch.cat(self._attended_shifts) if self._attended_shifts else None
            inputs, outputs = (NamedMatrices(kept) for kept in self._shifts)
            shifts = Shifts(inputs, outputs, attended)
        return replace(
            first,
            inputs=self._inputs,
            attended=first.attended if self._values is None else Hessian(self._values),
            shifts=shifts,
            magnitudes=self._magnitudes,
            reached=self._reached,
        )

    def _kept(self, matrices: Mapping[str, Tensor]) -> dict[str, Matrices]:
        """Return matrices ``[1, ...]`` of inputs where they are to be."""
        kept: dict[str, Matrices] = {**matrices}
        for name in matrices.keys() & self._on_disk:
            kept[name] = MatricesOnDisk(self._store, self._device).append(matrices[name])
        return kept
