"""Figures of losses: over iterations, and what is left of nearest rounding's loss at the end."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from aespa_pl.report.curves import NOT_NEAREST, RECONSTRUCTION, Floats
from aespa_pl.report.picture import (
    DEPTHS,
    HALF,
    HEAT,
    MARKERS,
    SERIES,
    STYLES,
    WIDE,
    Picture,
    block_names,
    block_ticks,
    depth_axis,
    depth_colour,
    depth_step,
    on_heat,
    panels,
    value_axis,
)
from aespa_pl.report.stored import StoredRun

Ratios = dict[tuple[int, str], float]

NOT_LEARNED = (
    "No loss curve was stored by this run: its method learns nothing, or trainer.logger is false."
)
NO_BLOCK = "Not stored by this run: no block is finished."


def final_ratios(run: StoredRun) -> Ratios:
    """Return the final loss of each projection relative to nearest rounding's."""
    return {
        key: values["final"] / values["nearest"]
        for key, values in run.losses.items()
        if values.get("nearest", 0) > 0 and "final" in values
    }


def moved_shares(run: StoredRun) -> tuple[Ratios, bool]:
    """Return the share of integers that differ from nearest rounding's, and whether it is the final one.

    The journal knows the final share; the curves know the share that learning ended with, before polish.
    """
    stored = {
        key: values[NOT_NEAREST] for key, values in run.losses.items() if NOT_NEAREST in values
    }
    if stored:
        return stored, True
    curves = run.curves.of(NOT_NEAREST)
    return {key: float(curve.values[-1]) for key, curve in curves.items()}, False


def final_loss_map(run: StoredRun, width: float, limits: tuple[float, float]) -> Picture:
    """Return the heat map of depth and projection that shows where the model suffers.

    Args:
        run: What to draw.
        width: Inches that it may take.
        limits: Ratios at the ends of the colours; the same for all runs of a page.
    """
    ratios = final_ratios(run)
    name, title = "final-loss", "Final loss, relative to nearest rounding"
    if not ratios:
        return Picture(name, title, NO_BLOCK)
    median = float(np.median(list(ratios.values())))
    worst, best = max(ratios, key=ratios.__getitem__), min(ratios, key=ratios.__getitem__)
    above = sum(ratio > 1 for ratio in ratios.values())
    caption = (
        f"Half of the {len(ratios)} projections end below {median:.2f} of nearest rounding's loss. Least is "
        f"gained in {worst[1]} of block {worst[0]} ({ratios[worst]:.2f}), most in "
        f"{best[1]} of block {best[0]} ({ratios[best]:.2f}). "
        + (
            f"{above} are worse than nearest rounding."
            if above
            else "None is worse than nearest rounding."
        )
    )
    label = "final loss / loss of\nnearest rounding"
    return Picture(name, title, caption, heat_map(ratios, run.projections, width, limits, label))


def moved_map(run: StoredRun, width: float, limits: tuple[float, float]) -> Picture:
    """Return the heat map of the share of integers that are not rounded to the nearest.

    Args:
        run: What to draw.
        width: Inches that it may take.
        limits: Shares at the ends of the colours.
    """
    shares, final = moved_shares(run)
    name, title = "moved", "Integers moved away from nearest rounding"
    if not shares:
        return Picture(
            name,
            title,
            "Not stored by this run: neither its journal nor its curves have the share.",
        )
    most, least = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
    caption = (
        f"{100 * np.mean(list(shares.values())):.0f} % of a projection's integers on average are not the "
        f"nearest: most in {most[1]} of block {most[0]} ({100 * shares[most]:.0f} %), fewest in "
        f"{least[1]} of block {least[0]} ({100 * shares[least]:.0f} %). "
        + (
            ""
            if final
            else "This is the share after learning; what polish moved later is not in it."
        )
    )
    names = [name for name in run.projections if any(key[1] == name for key in shares)]
    return Picture(
        name, title, caption, heat_map(shares, names, width, limits, "share of integers")
    )


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

    Args:
        values: By block and projection.
        projections: Rows.
        width: Inches that the figure may take.
        limits: Values at the ends of the colours.
        label: Of the colours.
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
    axes.set(yticks=range(len(projections)), yticklabels=projections)
    axes.invert_yaxis()
    block_ticks(axes, blocks)
    if (size[0] - 3) / len(blocks) > 0.38:  # inches that a number takes
        _write_numbers(figure, cells, limits)
    figure.colorbar(mesh, ax=axes, label=label, pad=0.02)
    return figure


def _write_numbers(figure: Figure, cells: Floats, limits: tuple[float, float]) -> None:
    for (row, column), value in np.ndenumerate(cells):
        if np.isfinite(value):
            share = (value - limits[0]) / (limits[1] - limits[0])
            figure.axes[0].text(
                column,
                row,
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=8,
                color=on_heat(share),
            )


def loss_curves(run: StoredRun, width: float) -> Picture:
    """Return the reconstruction loss over iterations, a panel for each projection, a line for each block."""
    name, title = "loss-curves", "Loss over iterations"
    curves = run.curves.of(RECONSTRUCTION)
    relative = {
        key: curve.values / run.losses[key]["nearest"]
        for key, curve in curves.items()
        if run.losses.get(key, {}).get("nearest", 0) > 0
    }
    if not relative:
        return Picture(name, title, NOT_LEARNED if run.blocks else NO_BLOCK)
    learned = [
        projection for projection in run.projections if any(p == projection for _, p in relative)
    ]
    blocks = sorted({block for block, _ in relative})
    figure, axes = panels(len(learned), width, 1.75)
    for (block, projection), values in sorted(relative.items()):
        position = blocks.index(block)
        axes[learned.index(projection)].plot(
            curves[block, projection].steps,
            values,
            color=depth_colour(position, len(blocks)),
            linewidth=1.5 if len(blocks) <= DEPTHS else 0.9,
        )
    for panel, projection in zip(axes, learned, strict=True):
        panel.set(title=projection, xlabel="iteration")
        value_axis(panel)
    figure.supylabel("loss / loss of nearest rounding", fontsize=9)
    _depth_legend(figure, blocks)
    return Picture(name, title, _curves_caption(run, relative), figure)


def _depth_legend(figure: Figure, blocks: list[int]) -> None:
    """Name the blocks that each colour of the ramp stands for."""
    steps: dict[int, list[int]] = {}
    for position, block in enumerate(blocks):
        steps.setdefault(depth_step(position, len(blocks)), []).append(block)
    lines = [figure.axes[0].plot([], [], color=depth_colour(0, 1))[0] for _ in steps]
    for line, group in zip(lines, steps.values(), strict=True):
        line.set(color=depth_colour(blocks.index(group[0]), len(blocks)), linewidth=2.5)
    figure.legend(
        lines,
        [block_names(group) for group in steps.values()],
        loc="outside lower center",
        ncols=min(len(steps), max(2, int(figure.get_figwidth() / 1.3))),
    )


def _curves_caption(run: StoredRun, relative: Mapping[tuple[int, str], Floats]) -> str:
    ends = [float(values[-1]) for values in relative.values()]
    rises = [values[-1] / values.min() for values in relative.values()]
    unfinished = {block for block, _ in run.curves.of(RECONSTRUCTION)} - set(run.blocks)
    return (
        f"Learning ends at {np.median(ends):.2f} of nearest rounding's loss (median of {len(ends)} curves, "
        f"{min(ends):.2f} to {max(ends):.2f}), before polish. While weights may lie between two integers the "
        f"loss is lower; deciding the last of them raises it by a factor of {np.median(rises):.2f} (median). "
        + (
            f"Not drawn: block {min(unfinished)}, which is under way; the loss of nearest rounding is stored "
            "when a block is finished."
            if unfinished
            else ""
        )
    )


def loss_by_depth(runs: Sequence[StoredRun]) -> Picture:
    """Return the mean of each block's relative losses over depth, a line for each run."""
    name, title = "loss-by-depth", "Final loss over depth, all runs"
    means: dict[int, dict[int, float]] = {}
    for number, run in enumerate(runs):
        by_block: dict[int, list[float]] = {}
        for (block, _), ratio in final_ratios(run).items():
            by_block.setdefault(block, []).append(ratio)
        # ratios multiply: their mean is geometric
        means[number] = {
            block: float(np.exp(np.mean(np.log(np.maximum(ratios, 1e-12)))))
            for block, ratios in sorted(by_block.items())
        }
    drawn = {number: values for number, values in means.items() if values}
    if not drawn:
        return Picture(name, title, NO_BLOCK)
    figure = Figure(figsize=(WIDE, 3.2), layout="constrained")
    axes = figure.subplots()
    for number, values in drawn.items():
        style: dict[str, Any] = {
            "color": SERIES[number % len(SERIES)],
            "linestyle": STYLES[number % len(STYLES)],
        }
        marker = MARKERS[number % len(MARKERS)] if len(values) < 30 else ""
        axes.plot(
            list(values), list(values.values()), label=runs[number].name, marker=marker, **style
        )
    axes.set(
        xlabel="block",
        ylabel="final loss / loss of nearest rounding\n(geometric mean of projections)",
    )
    depth_axis(axes)
    figure.legend(loc="outside lower center", ncols=2)
    return Picture(name, title, _depth_caption(runs, drawn), figure)


def _depth_caption(runs: Sequence[StoredRun], means: Mapping[int, Mapping[int, float]]) -> str:
    overall = {number: float(np.mean(list(values.values()))) for number, values in means.items()}
    best, worst = min(overall, key=overall.__getitem__), max(overall, key=overall.__getitem__)
    if overall[worst] - overall[best] < 0.005:
        return f"All runs leave the same share of nearest rounding's loss on average ({overall[best]:.2f})."
    return (
        f"{runs[best].name} leaves the least of nearest rounding's loss ({overall[best]:.2f} on average over "
        f"its blocks), {runs[worst].name} the most ({overall[worst]:.2f}). Losses of runs with another bit "
        "width or group size are relative to another nearest rounding."
    )
