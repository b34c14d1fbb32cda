"""Draw heat maps over blocks and projections."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from aespa_pl.report.picture import HALF, HEAT, Picture, block_ticks, on_heat
from aespa_pl.report.stored import StoredRun

Ratios = dict[tuple[int, str], float]
"""Numbers by block and projection."""


def final_ratios(run: StoredRun) -> Ratios:
    """Return the final loss of each projection relative to nearest rounding's."""
    return {
        key: values["final"] / values["nearest"]
        for key, values in run.losses.items()
        if values.get("nearest", 0) > 0 and "final" in values
    }


def final_loss_map(run: StoredRun, width: float, limits: tuple[float, float]) -> Picture:
    """Return the heat map of depth and projection that shows where the model suffers.

    ``width`` is the largest of the figure, in inches. ``limits`` are the ratios at the ends of the colours,
    which all runs of a page share.
    """
    ratios = final_ratios(run)
    if not ratios:
        return Picture(run.name, "Not stored by this run: no block is finished.")
    worst, best = (
        f"{key[1]} of block {key[0]} ({ratios[key]:.2f})"
        for key in (max(ratios, key=ratios.__getitem__), min(ratios, key=ratios.__getitem__))
    )
    above = sum(ratio > 1 for ratio in ratios.values())
    caption = (
        f"Half of the {len(ratios)} projections end below {np.median(list(ratios.values())):.2f} of nearest "
        f"rounding's loss. Least is gained in {worst}, most in {best}. "
        f"{f'{above} are' if above else 'None is'} worse than nearest rounding."
    )
    label = "final loss / loss of\nnearest rounding"
    return Picture(run.name, caption, heat_map(ratios, run.projections, width, limits, label))


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
    cells = [[values.get((block, name), np.nan) for block in blocks] for name in projections]
    # few blocks make no wide figure: cells keep their shape
    size = (min(width, max(HALF, 3.4 + 0.75 * len(blocks))), 0.34 * len(projections) + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    mesh = axes.pcolormesh(np.ma.masked_invalid(cells), cmap=HEAT, vmin=limits[0], vmax=limits[1])
    axes.grid(visible=False)
    axes.set(xlabel="block", yticks=np.arange(len(projections)) + 0.5, yticklabels=projections)
    axes.invert_yaxis()
    block_ticks(axes, blocks)
    if (size[0] - 3) / len(blocks) > 0.38:  # inches that a number takes
        for (row, column), value in np.ndenumerate(np.array(cells)):
            if np.isfinite(value):
                colour = on_heat((value - limits[0]) / (limits[1] - limits[0]))
                text = axes.text(column + 0.5, row + 0.5, f"{value:.2f}", color=colour, fontsize=8)
                text.set(ha="center", va="center")
    figure.colorbar(mesh, ax=axes, label=label, pad=0.02)
    return figure
