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
    from matplotlib.figure import Figure

PANEL = 4.2
"""Length of a panel's sides, in inches."""
REFERENCES = ("original", "nearest")
"""Models that the quantized one is measured by."""
LEAST_SECONDS = 0.05
"""Smallest seconds of a phase that has a column."""


@dataclass(frozen=True)
class Cell:
    """Holds one method on one kind of grids with one seed, and its result."""

    method: str
    grids: int | str
    """Bits of uniform grids, or ``quantization.format``."""
    seed: int
    metrics: Mapping[str, Any] | None = None
    """Content of the run's ``metrics.json``; None where the run did not come to its end."""
    failure: str = ""
    """Reason why the run did not come to its end; empty where it did."""

    @property
    def name(self) -> str:
        """Return the name of the run, which is also the name of its folder."""
        return f"{self.method}_{'w' if isinstance(self.grids, int) else ''}{self.grids}_s{self.seed}"

    @property
    def state(self) -> str:
        """Return ``finished``, or why there is no result."""
        return "finished" if self.metrics is not None else self.failure or "not run"

    def perplexity(self, text: str, kind: str = "quantized") -> float | None:
        """Return a perplexity of the run, None where it was not measured."""
        value: float | None = (self.metrics or {}).get("perplexity", {}).get(kind, {}).get(text)
        return value

    def relative_loss(self, text: str) -> float | None:
        """Return the part of nearest rounding's loss, in nats above the original model's, that is left."""
        ours = self.perplexity(text)
        original, nearest = (self.perplexity(text, kind) for kind in REFERENCES)
        if ours is None or original is None or nearest is None or nearest <= original:
            return None
        return math.log(ours / original) / math.log(nearest / original)

    def seconds(self, phase: str) -> float | None:
        """Return the seconds of a phase."""
        return self.metrics["seconds"].get(phase) if self.metrics else None

    @property
    def peak_bytes(self) -> int | None:
        """Return the largest memory of the run: of the device where it has its own, else of the host."""
        peaks: Mapping[str, int] = self.metrics["peak_bytes"] if self.metrics else {}
        return peaks.get("device") or peaks.get("host")

    @property
    def megabytes(self) -> float | None:
        """Return the size of the packed model."""
        sizes = self.metrics.get("size", {}) if self.metrics else {}
        return sizes["quantized"]["bytes"] / 1e6 if sizes else None


def texts_of(cells: Sequence[Cell]) -> list[str]:
    """Return the held-out texts of all cells, in their order."""
    measured = [c.metrics["perplexity"].get("quantized", {}) for c in cells if c.metrics]
    return list(dict.fromkeys(text for perplexities in measured for text in perplexities))


def phases_of(cells: Sequence[Cell]) -> list[str]:
    """Return the phases that a table in tenths of a second shows; ``quantization`` is all of them."""
    phases = (item for c in cells if c.metrics for item in c.metrics["seconds"].items())
    shown = (phase for phase, taken in phases if taken >= LEAST_SECONDS and phase != "total")
    return list(dict.fromkeys(shown))


def summary(cells: Sequence[Cell]) -> TextTable:
    """Return a row for each method and kind of grids: means over the seeds, and the perplexity's spread.

    The original model has a row before them, and nearest rounding one for each kind of grids, where known.
    """
    texts, phases = texts_of(cells), phases_of(cells)
    head = ["method", "bits"]
    for text in texts:
        head += [f"perplexity, {text}", f"loss / nearest, {text}"]
    details = [*(f"{phase}, s" for phase in phases), "peak, GB", "failed"]
    head += [*details[:-2], "packed, MB", "peak, GB", "runs", "failed"]
    rows = _reference("original", ABSENT, cells, head)
    for grids in dict.fromkeys(cell.grids for cell in cells):
        same_grids = [cell for cell in cells if cell.grids == grids]
        rows += _reference("nearest", str(grids), same_grids, head)
        for method in dict.fromkeys(cell.method for cell in same_grids):
            seeds = [cell for cell in same_grids if cell.method == method]
            row = [method, str(grids)]
            for text in texts:
                row.append(_mean([c.perplexity(text) for c in seeds], 3, spread=True))
                row.append(_mean([c.relative_loss(text) for c in seeds], 3))
            row += [_mean([c.seconds(phase) for c in seeds], 1) for phase in phases]
            row.append(_mean([c.megabytes for c in seeds], 2))
            row.append(_mean([c.peak_bytes and c.peak_bytes / GB for c in seeds], 2))
            failed = [f"seed {c.seed}: {c.state}" for c in seeds if c.metrics is None]
            rows.append([*row, f"{len(seeds) - len(failed)} of {len(seeds)}", "; ".join(failed) or ABSENT])
    return TextTable(head, rows, details=[head.index(name) for name in details])


def _reference(kind: str, grids: str, cells: Sequence[Cell], head: Sequence[str]) -> list[list[str]]:
    """Return a row of one of ``REFERENCES``, which has perplexities alone; no row where none are known."""
    known = {f"perplexity, {t}": _mean([c.perplexity(t, kind) for c in cells], 3) for t in texts_of(cells)}
    if set(known.values()) <= {ABSENT}:
        return []
    return [[kind, grids, *(known.get(name, ABSENT) for name in head[2:])]]


def _mean(values: Sequence[float | None], digits: int, *, spread: bool = False) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ABSENT
    deviation = f" ± {stdev(known):.{digits}f}" if spread and len(known) > 1 else ""
    return f"{mean(known):.{digits}f}{deviation}"


def cells_csv(cells: Sequence[Cell]) -> str:
    """Return a line for each cell, with its numbers unrounded, and the perplexities of ``REFERENCES``."""
    texts, phases = texts_of(cells), phases_of(cells)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = ("perplexity", *REFERENCES, "loss / nearest")
    of_texts = [f"{column} {text}" for text in texts for column in columns]
    of_phases = [f"seconds {phase}" for phase in phases]
    writer.writerow(["method", "bits", "seed", "state", *of_texts, *of_phases, "peak bytes", "MB"])
    for cell in cells:
        row: list[Any] = [cell.method, cell.grids, cell.seed, cell.state]
        for text in texts:
            row += [cell.perplexity(text, kind) for kind in ("quantized", *REFERENCES)]
            row.append(cell.relative_loss(text))
        row += [cell.seconds(phase) for phase in phases]
        writer.writerow([*row, cell.peak_bytes, cell.megabytes])
    return out.getvalue()


def figure(cells: Sequence[Cell]) -> "Figure | None":
    """Return the first text's perplexity over size, and over time in a panel for each bit width or format.

    None where nothing was measured. A point is the mean over the seeds; a method looks the same in all
    panels. Raises ModuleNotFoundError without matplotlib.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 (optional)

    from aespa_pl.report.picture import MARKERS, SERIES, style  # noqa: PLC0415 (needs matplotlib)

    if not (texts := texts_of(cells)):
        return None
    widths = list(dict.fromkeys(cell.grids for cell in cells))
    methods = list(dict.fromkeys(cell.method for cell in cells))
    handles = {}
    with style():  # a dollar sign in a name is no formula
        drawn = Figure(figsize=(PANEL * (len(widths) + 1) + 1, PANEL), layout="constrained")
        of_size, *panels = drawn.subplots(1, len(widths) + 1, squeeze=False)[0]
        of_size.set(xlabel="packed model, MB")
        for panel, grids in zip(panels, widths, strict=True):
            words = f"{grids} bits" if isinstance(grids, int) else grids
            panel.set(xscale="log", title=words, xlabel="seconds of quantization")
            for number, method in enumerate(methods):
                seeds = [c for c in cells if (c.grids, c.method) == (grids, method) and c.metrics]
                values = [x for cell in seeds if (x := cell.perplexity(texts[0])) is not None]
                if not values:
                    continue
                turn, color = divmod(number, len(SERIES))  # after all colours each has another marker
                look = {"color": SERIES[color], "marker": MARKERS[(color + turn) % len(MARKERS)]}
                spread = stdev(values) if len(values) > 1 else 0.0
                seconds = mean(cell.seconds("quantization") or 0.0 for cell in seeds)
                handles[method] = panel.errorbar(seconds, mean(values), spread, **look, linestyle="")
                if sizes := [x for cell in seeds if (x := cell.megabytes) is not None]:
                    of_size.errorbar(mean(sizes), mean(values), spread, **look, linestyle="")
        for panel in (of_size, *panels):
            panel.set(yscale="log", ylabel=f"perplexity, {texts[0]} (lower is better)")
        drawn.legend(handles.values(), handles.keys(), loc="outside right upper")
    return drawn
