"""Read what a run has logged for TensorBoard: scalars and histograms, by block and projection."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tensorboard.backend.event_processing.event_accumulator import (
    HISTOGRAMS,
    SCALARS,
    EventAccumulator,
)

from aespa_pl.curve_names import NOT_NEAREST, RECONSTRUCTION

Floats = NDArray[np.float64]

OLDER_NAMES = {"reconstruction_loss": RECONSTRUCTION, "differs_from_nearest": NOT_NEAREST}
"""Names that runs of journal format 1 gave the curves."""
EVERYTHING = {SCALARS: 0, HISTOGRAMS: 0}
"""TensorBoard's own default keeps a random thousand scalars and one histogram of a tag."""


@dataclass(frozen=True)
class Curve:
    """Holds a scalar over iterations."""

    steps: Floats
    values: Floats


@dataclass(frozen=True)
class HistogramSeries:
    """Holds a distribution over iterations."""

    steps: Floats
    """Iterations of the histograms, ``[times]``."""
    edges: Floats
    """Borders of the bins, ``[bins + 1]``, from 0 to 1."""
    shares: Floats
    """Share of the values in each bin, ``[times, bins]``; each row adds up to 1."""


@dataclass(frozen=True)
class Curves:
    """Holds all that the blocks of a run have logged."""

    scalars: dict[str, dict[tuple[int, str], Curve]] = field(default_factory=dict)
    """Curves by name (``loss_reconstruction``), then by block and projection. The name of a sublayer's curves
    ends with the sublayer's (``tuning/attention``)."""
    histograms: dict[str, dict[tuple[int, str], HistogramSeries]] = field(default_factory=dict)
    """Histograms by name, then by block and projection."""
    unreadable: tuple[Path, ...] = ()
    """Folders whose files could not be read."""

    def of(self, name: str) -> dict[tuple[int, str], Curve]:
        """Return the curves of one name by block and projection; none if nothing was logged."""
        return self.scalars.get(name, {})


def read_curves(run: Path) -> Curves:
    """Read the event files of all blocks; a file that is still being written is read so far.

    Args:
        run: The run's folder, with folders ``block_NNN`` in it, and ``block_NNN_UNIT`` for a sublayer that
            was tuned by itself.
    """
    curves, unreadable = Curves(), []
    for folder in sorted(run.glob("block_*")):
        number, _, unit = folder.name.removeprefix("block_").partition("_")
        if not folder.is_dir() or not number.isdecimal():
            continue
        events = EventAccumulator(str(folder), size_guidance=EVERYTHING)
        try:
            events.Reload()
            _add_block(curves, int(number), unit, events)
        except Exception:  # noqa: BLE001  (protobuf's and the file system's errors share no class)
            unreadable.append(folder)
    return Curves(curves.scalars, curves.histograms, tuple(unreadable))


def _add_block(curves: Curves, block: int, unit: str, events: EventAccumulator) -> None:
    """Add what is logged for a block, or for one of its sublayers (``unit``; else it is empty)."""
    for tag, name, projection in _tags(events, SCALARS):
        points = events.Scalars(tag)
        curve = Curve(
            np.array([point.step for point in points], float),
            np.array([point.value for point in points], float),
        )
        curves.scalars.setdefault(f"{name}/{unit}" if unit else name, {})[block, projection] = curve
    for tag, name, projection in _tags(events, HISTOGRAMS):
        series = _histogram_series(events, tag)
        curves.histograms.setdefault(name, {})[block, projection] = series


def _tags(events: EventAccumulator, kind: str) -> Iterator[tuple[str, str, str]]:
    for tag in events.Tags()[kind]:
        name, slash, projection = tag.partition("/")
        if slash:
            yield tag, OLDER_NAMES.get(name, name), projection


def _histogram_series(events: EventAccumulator, tag: str, bins: int = 25) -> HistogramSeries:
    """Return the histograms of one tag on equal bins from 0 to 1.

    TensorBoard's own bins differ from time to time. The count of a bin is spread evenly between its
    edges: the cumulative counts are interpolated at our edges.
    """
    entries = events.Histograms(tag)
    edges = np.linspace(0, 1, bins + 1)
    rows = []
    for entry in entries:
        counts = np.array(entry.histogram_value.bucket, float)
        limits = np.array(entry.histogram_value.bucket_limit, float)
        cumulative = np.concatenate([[0.0], np.cumsum(counts)])
        starts = np.concatenate([[entry.histogram_value.min], limits])
        # the last bin may end at the largest double, the first one starts at the smallest value
        starts = np.maximum.accumulate(np.clip(starts, 0, max(1.0, entry.histogram_value.max)))
        below = np.interp(edges, starts, cumulative, left=0.0, right=cumulative[-1])
        below[0], below[-1] = 0.0, cumulative[-1]
        rows.append(np.diff(below) / max(cumulative[-1], 1.0))
    steps = np.array([entry.step for entry in entries], float)
    return HistogramSeries(steps, edges, np.array(rows))
