"""Make the table and the figure of ``aespa-pl compare``, with mean and spread over seeds."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from aespa_pl.evaluation.table import ABSENT, GB, TextTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL = 4.2
"""Length of a panel's sides, in inches."""
REFERENCES = ("original", "nearest")
"""Models that the quantized one is measured by."""
LEAST_SECONDS = 0.05
"""Smallest seconds of a phase that has a column."""


@dataclass(frozen=True)
class Cell:
    """Holds one method at one bit width with one seed, and its result."""

    method: str
    bits: int
    seed: int
    metrics: Mapping[str, Any] | None = None
    """Content of the run's ``metrics.json``; None where the run did not come to its end."""
    failure: str = ""
    """Reason why the run did not come to its end; empty where it did."""

    @property
    def name(self) -> str:
        """Return the name of the run, which is also the name of its folder."""
        return f"{self.method}_w{self.bits}_s{self.seed}"

    @property
    def state(self) -> str:
        """Return ``finished``, or why there is no result."""
        return "finished" if self.metrics is not None else self.failure or "not run"

    def perplexity(self, text: str, kind: str = "quantized") -> float | None:
        """Return a perplexity of the run, None where it was not measured."""
        if self.metrics is None:
            return None
        found: float | None = self.metrics["perplexity"].get(kind, {}).get(text)
        return found

    def relative_loss(self, text: str) -> float | None:
        """Return the share of nearest rounding's loss that is left: 0 is the original model, 1 is nearest.

        The loss is the logarithm of the perplexity above the original model's.
        """
        ours = self.perplexity(text)
        original, nearest = self.perplexity(text, "original"), self.perplexity(text, "nearest")
        if ours is None or original is None or nearest is None or nearest <= original:
            return None
        return math.log(ours / original) / math.log(nearest / original)

    def seconds(self, phase: str) -> float | None:
        """Return the seconds of a phase."""
        return None if self.metrics is None else self.metrics["seconds"].get(phase)

    @property
    def peak_bytes(self) -> int | None:
        """Return the largest memory of the run: of the device where it has its own, else of the host."""
        if self.metrics is None:
            return None
        peaks: Mapping[str, int] = self.metrics["peak_bytes"]
        return peaks.get("device") or peaks["host"]


def texts_of(cells: Sequence[Cell]) -> list[str]:
    """Return the held-out texts of all cells, in their order."""
    found = [
        text
        for cell in cells
        if cell.metrics is not None
        for text in cell.metrics["perplexity"].get("quantized", {})
    ]
    return list(dict.fromkeys(found))


def phases_of(cells: Sequence[Cell]) -> list[str]:
    """Return the phases that a table in tenths of a second shows; ``quantization`` is all of them."""
    found = [
        phase
        for cell in cells
        if cell.metrics is not None
        for phase, seconds in cell.metrics["seconds"].items()
        if seconds >= LEAST_SECONDS and phase != "total"
    ]
    return list(dict.fromkeys(found))


def summary(cells: Sequence[Cell]) -> TextTable:
    """Return a row for each method and bit width: mean and standard deviation over the seeds.

    The spread is of the perplexity; where a seed gave no result, the row says so.
    """
    texts, phases = texts_of(cells), phases_of(cells)
    head = ["method", "bits"]
    for text in texts:
        head += [f"perplexity, {text}", f"loss / nearest, {text}"]
    head += [*(f"{phase}, s" for phase in phases), "peak, GB", "runs"]
    rows = []
    for bits in dict.fromkeys(cell.bits for cell in cells):
        same_bits = [cell for cell in cells if cell.bits == bits]
        for method in dict.fromkeys(cell.method for cell in same_bits):
            seeds = [cell for cell in same_bits if cell.method == method]
            row = [method, str(bits)]
            for text in texts:
                row.append(_mean([c.perplexity(text) for c in seeds], 3, spread=True))
                row.append(_mean([c.relative_loss(text) for c in seeds], 3))
            row += [_mean([c.seconds(phase) for c in seeds], 1) for phase in phases]
            peaks = [None if c.peak_bytes is None else c.peak_bytes / GB for c in seeds]
            rows.append([*row, _mean(peaks, 2), _states(seeds)])
    return TextTable(head, rows)


def _mean(values: Sequence[float | None], digits: int, *, spread: bool = False) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ABSENT
    deviation = f" ± {stdev(known):.{digits}f}" if spread and len(known) > 1 else ""
    return f"{mean(known):.{digits}f}{deviation}"


def _states(seeds: Sequence[Cell]) -> str:
    """Return how many runs the row is the mean of, and why the others are not in it."""
    finished = sum(cell.state == "finished" for cell in seeds)
    failed = [f"seed {c.seed}: {c.state}" for c in seeds if c.state != "finished"]
    return "; ".join([f"{finished} of {len(seeds)}", *failed])


def cells_csv(cells: Sequence[Cell]) -> str:
    """Return a line for each cell, with its numbers unrounded.

    Beside the perplexity on each text stand those of the original model and of nearest rounding.
    """
    texts, phases = texts_of(cells), phases_of(cells)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    head = ["method", "bits", "seed", "state"]
    for text in texts:
        columns = ("perplexity", *REFERENCES, "loss / nearest")
        head += [f"{column} {text}" for column in columns]
    writer.writerow([*head, *(f"seconds {phase}" for phase in phases), "peak bytes"])
    for cell in cells:
        row: list[Any] = [cell.method, cell.bits, cell.seed, cell.state]
        for text in texts:
            row += [cell.perplexity(text), *(cell.perplexity(text, kind) for kind in REFERENCES)]
            row.append(cell.relative_loss(text))
        writer.writerow([*row, *(cell.seconds(phase) for phase in phases), cell.peak_bytes])
    return out.getvalue()


def figure(cells: Sequence[Cell]) -> "Figure | None":
    """Return perplexity over time, one panel for each bit width; None where nothing was measured.

    The perplexity belongs to the first text; one point is the mean over the seeds.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from aespa_pl.report.picture import style  # noqa: PLC0415 (optional)

    texts = texts_of(cells)
    if not texts:
        return None
    widths = list(dict.fromkeys(cell.bits for cell in cells))
    methods = list(dict.fromkeys(cell.method for cell in cells))
    with style():  # a dollar sign in a name is no formula
        return _drawn(cells, texts[0], widths, methods)


def _drawn(
    cells: Sequence[Cell], text: str, widths: Sequence[int], methods: Sequence[str]
) -> "Figure":
    from matplotlib.figure import Figure  # noqa: PLC0415 (optional)

    drawn = Figure(figsize=(PANEL * len(widths) + 1, PANEL), layout="constrained")
    panels = drawn.subplots(1, len(widths), squeeze=False)[0]
    for panel, bits in zip(panels, widths, strict=True):
        for number, method in enumerate(methods):
            same = [c for c in cells if (c.bits, c.method) == (bits, method)]
            _draw(panel, number, method, text, same)
        panel.set(
            xscale="log",
            yscale="log",
            title=f"{bits} bits",
            xlabel="seconds of quantization",
            ylabel=f"perplexity, {text} (lower is better)",
        )
    handles = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    drawn.legend(handles.values(), handles.keys(), loc="outside right upper")
    return drawn


def _draw(panel: "Axes", number: int, method: str, text: str, seeds: Sequence[Cell]) -> None:
    from aespa_pl.report.picture import MARKERS, SERIES  # noqa: PLC0415 (optional)

    points = [
        (seconds, value)
        for cell in seeds
        if (value := cell.perplexity(text)) is not None
        and (seconds := cell.seconds("quantization")) is not None
    ]
    if not points:
        return
    times, values = zip(*points, strict=True)
    spread = stdev(values) if len(values) > 1 else 0.0
    panel.errorbar(
        mean(times),
        mean(values),
        yerr=spread,
        color=SERIES[number % len(SERIES)],
        marker=MARKERS[number % len(MARKERS)],
        linestyle="",
        label=method,
    )
