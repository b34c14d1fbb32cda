"""Draw heat maps over blocks and projections: where the model suffers, and where integers moved."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from aespa_pl.curve_names import NOT_NEAREST
from aespa_pl.report.picture import HALF, HEAT, Picture, block_ticks, on_heat
from aespa_pl.report.stored import StoredRun

Ratios = dict[tuple[int, str], float]
"""Numbers by block and projection."""

NO_BLOCK = "Not stored by this run: no block is finished."


def final_ratios(run: StoredRun) -> Ratios:
    """Return the final loss of each projection relative to nearest rounding's."""
    return {
        key: values["final"] / values["nearest"]
        for key, values in run.losses.items()
        if values.get("nearest", 0) > 0 and "final" in values
    }


def moved_integers(run: StoredRun) -> Ratios:
    """Return which part of each projection's integers differs from nearest rounding's."""
    return {key: values[NOT_NEAREST] for key, values in run.losses.items() if NOT_NEAREST in values}


def final_loss_map(run: StoredRun, width: float, limits: tuple[float, float]) -> Picture:
    """Return the heat map of depth and projection that shows where the model suffers.

    ``width`` is the largest of the figure, in inches. ``limits`` are the ratios at the ends of the colours,
    which all runs of a page share.
    """
    ratios = final_ratios(run)
    name, title = "final-loss", "Final loss, relative to nearest rounding"
    if not ratios:
        return Picture(name, title, NO_BLOCK)
    median = float(np.median(list(ratios.values())))
    worst, best = _ends(ratios, lambda ratio: f"{ratio:.2f}")
    above = sum(ratio > 1 for ratio in ratios.values())
    caption = (
        f"Half of the {len(ratios)} projections end below {median:.2f} of nearest rounding's loss. Least is "
        f"gained in {worst}, most in {best}. {f'{above} are' if above else 'None is'} worse than nearest "
        "rounding."
    )
    label = "final loss / loss of\nnearest rounding"
    return Picture(name, title, caption, heat_map(ratios, run.projections, width, limits, label))


def moved_map(run: StoredRun, width: float, limits: tuple[float, float]) -> Picture:
    """Return the heat map of how many integers are not rounded to the nearest; arguments as above."""
    moved = moved_integers(run)
    name, title = "moved", "Integers moved away from nearest rounding"
    if not moved:
        return Picture(name, title, NO_BLOCK)
    most, fewest = _ends(moved, lambda part: f"{100 * part:.0f} %")
    caption = (
        f"{100 * np.mean(list(moved.values())):.0f} % of a projection's integers on average are not the "
        f"nearest: most in {most}, fewest in {fewest}."
    )
    names = [name for name in run.projections if any(key[1] == name for key in moved)]
    return Picture(name, title, caption, heat_map(moved, names, width, limits, "part of integers"))


def _ends(values: Ratios, words: Callable[[float], str]) -> tuple[str, str]:
    """Return in words where the largest and the smallest value are."""
    largest, smallest = max(values, key=values.__getitem__), min(values, key=values.__getitem__)
    first, last = (
        f"{name} of block {block} ({words(values[block, name])})" for block, name in (largest, smallest)
    )
    return first, last


def limits_of(maps: Sequence[Ratios], step: float = 0.05) -> tuple[float, float]:
    """Return limits that hold all values of all maps, rounded outwards to ``step``."""
    values = [value for ratios in maps for value in ratios.values()]
    if not values:
        return 0.0, 1.0
    low, high = np.floor(min(values) / step) * step, np.ceil(max(values) / step) * step
    return float(low), float(max(high, low + step))


def heat_map(
    values: Mapping[tuple[int, str], float],
    projections: Sequence[str],
    width: float,
    limits: tuple[float, float],
    label: str,
) -> Figure:
    """Return blocks from left to right, projections from top to bottom; cells without a value stay empty.

    ``width`` and ``limits`` are those of :func:`final_loss_map`; ``label`` is that of the colours.
    """
    blocks = sorted({block for block, _ in values})
    cells = np.full((len(projections), len(blocks)), np.nan)
    for (block, projection), value in values.items():
        cells[list(projections).index(projection), blocks.index(block)] = value
    # few blocks make no wide figure: cells keep their shape
    size = (min(width, max(HALF, 3.4 + 0.75 * len(blocks))), 0.34 * len(projections) + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    mesh = axes.pcolormesh(
        np.arange(len(blocks) + 1) - 0.5,
        np.arange(len(projections) + 1) - 0.5,
        np.ma.masked_invalid(cells),
        cmap=HEAT,
        vmin=limits[0],
        vmax=limits[1],
    )
    axes.grid(visible=False)
    axes.set(xlabel="block", yticks=range(len(projections)), yticklabels=projections)
    axes.invert_yaxis()
    block_ticks(axes, blocks)
    if (size[0] - 3) / len(blocks) > 0.38:  # inches that a number takes
        _write_numbers(figure, cells, limits)
    figure.colorbar(mesh, ax=axes, label=label, pad=0.02)
    return figure


def _write_numbers(figure: Figure, cells: NDArray[np.float64], limits: tuple[float, float]) -> None:
    for (row, column), value in np.ndenumerate(cells):
        if np.isfinite(value):
            place = (value - limits[0]) / (limits[1] - limits[0])
            look: dict[str, Any] = {
                "ha": "center",
                "va": "center",
                "fontsize": 8,
                "color": on_heat(place),
            }
            figure.axes[0].text(column, row, f"{value:.2f}", **look)
