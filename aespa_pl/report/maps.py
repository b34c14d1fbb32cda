"""Draw heat maps over blocks and projections, and what size was chosen for a target."""

import math
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from aespa_pl.export.gguf_bytes import BLOCK_TYPES
from aespa_pl.report.picture import HALF, HEAT, SERIES, Picture
from aespa_pl.report.stored import StoredRun
from aespa_pl.run.schema import StoredMixture
from aespa_pl.sizing.choose import counted

Ratios = dict[tuple[int, str], float]
"""Numbers by block and projection."""
TICKS = 12
"""Number of blocks that are labelled at most."""
WIDTHS = (2.0, 8.5)
"""Bits of a weight at the ends of the colours."""
CURVE_SHARE = 1.5
"""Largest size of the curve beside the chosen one: beyond it the divergence is nearly 0."""


def final_ratios(run: StoredRun) -> Ratios:
    """Return the final loss of each projection relative to nearest rounding's."""
    return {
        key: values["final"] / values["nearest"]
        for key, values in run.losses.items()
        if values.get("nearest", 0) > 0 and "final" in values
    }


def worst_first(ratios: Ratios) -> list[str]:
    """Return projections with their ratios in words, the largest first."""
    ranked = sorted(ratios, key=ratios.__getitem__, reverse=True)
    return [f"{name} of block {block} ({ratios[block, name]:.2f})" for block, name in ranked]


def no_losses(run: StoredRun) -> str:
    """Return why a run has no losses to show."""
    return "finished blocks keep their weights" if run.journal.blocks else "no block is finished"


def final_loss_map(run: StoredRun, width: float, limits: tuple[float, float]) -> Picture:
    """Return the heat map of the losses that are left, at most ``width`` inches wide.

    ``limits`` are the ratios at the ends of the colours, which all runs of a page share.
    """
    ratios = final_ratios(run)
    if not ratios:
        return Picture(run.name, f"Not stored by this run: {no_losses(run)}.")
    ranked = worst_first(ratios)
    above = sum(ratio > 1 for ratio in ratios.values())
    caption = (
        f"Half of the {len(ratios)} projections end below {np.median(list(ratios.values())):.2f} of nearest "
        f"rounding's loss. Least is gained in {ranked[0]}, most in {ranked[-1]}. "
        f"{f'{above} are' if above else 'None is'} worse than nearest rounding."
    )
    names = list(dict.fromkeys(name for _, name in run.losses))
    label = "final loss / loss of\nnearest rounding"
    return Picture(run.name, caption, heat_map(ratios, names, width, limits, label))


def limits_of(maps: Sequence[Ratios]) -> tuple[float, float]:
    """Return limits that hold all values of all maps, rounded outwards to twentieths."""
    values, step = [value for ratios in maps for value in ratios.values()], 0.05
    if not values:
        return 0.0, 1.0
    low, high = np.floor(min(values) / step) * step, np.ceil(max(values) / step) * step
    return float(low), float(max(high, low + step))


def heat_map(
    values: Ratios, projections: Sequence[str], width: float, limits: tuple[float, float], label: str
) -> Figure:
    """Return blocks from left to right, projections from top to bottom; ``label`` is that of the colours."""
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
    step = math.ceil(len(blocks) / TICKS)
    axes.set_xticks(np.arange(0, len(blocks), step) + 0.5, [str(block) for block in blocks[::step]])
    if (size[0] - 3) / len(blocks) > 0.38:  # inches that a number takes
        for (row, column), value in np.ndenumerate(np.array(cells)):
            if np.isfinite(value):
                place = (value - limits[0]) / (limits[1] - limits[0])
                red, green, blue, _ = mpl.colormaps[HEAT](place)
                colour = "#ffffff" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "#000000"
                text = axes.text(column + 0.5, row + 0.5, f"{value:.2f}", color=colour, fontsize=8)
                text.set(ha="center", va="center")
    figure.colorbar(mesh, ax=axes, label=label, pad=0.02)
    return figure


def width_map(run: StoredRun, mixture: StoredMixture, width: float) -> Picture:
    """Return the heat map of the bits that each projection has; ``width`` is the figure's largest."""
    bits, ends = Ratios(), list[str]()
    for key, chosen in mixture.chosen.items():
        block, _, name = key.rpartition(".")
        if block:
            bits[int(block), name] = float(chosen) if chosen.isdigit() else BLOCK_TYPES[chosen].bits
        else:
            ends.append(f"{name}: {chosen}")
    names = list(dict.fromkeys(name for _, name in bits))
    of_ends = f" ({', '.join(ends)})" if ends else ""
    caption = f"Chosen are {counted(mixture.chosen)}{of_ends}."
    return Picture(run.name, caption, heat_map(bits, names, width, WIDTHS, "bits a weight"))


def size_curve(run: StoredRun, mixture: StoredMixture, width: float) -> Picture:
    """Return size against predicted divergence, with llama.cpp's mixtures as points."""
    scale, unit = (1e9, "GB") if mixture.bytes >= 1e9 else (1e6, "MB")
    figure = Figure(figsize=(min(width, HALF), 3.2), layout="constrained")
    axes = figure.subplots()
    most = CURVE_SHARE * mixture.bytes
    points = [point for point in mixture.curve if point[0] <= most] or mixture.curve
    sizes, losses = zip(*points, strict=True)
    axes.semilogy(np.array(sizes) / scale, losses, color=SERIES[0], label="best choice")
    axes.plot(mixture.bytes / scale, mixture.predicted, "o", color=SERIES[0], label="this run")
    # several names may have the same types, because rows are no whole blocks: the first one stands for them
    shown = {p: name for name, p in reversed(mixture.others.items()) if p[0] <= most}
    for (size, loss), name in shown.items():
        axes.plot(size / scale, loss, "s", color=SERIES[1])
        axes.annotate(name, (size / scale, loss), (4, 3), textcoords="offset points", fontsize=7)
    if shown:
        axes.plot([], [], "s", color=SERIES[1], label="llama.cpp's mixtures")
    of_texts = run.metrics.get("divergence", {}).get("quantized", {})
    measured = {name: values["mean"] for name, values in of_texts.items() if values.get("mean")}
    for name, value in measured.items():
        axes.plot(mixture.bytes / scale, value, "x", color=SERIES[2], label=f"measured, {name}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")  # what is less than a decade has no major ticks
    axes.set(xlabel=f"file, {unit}", ylabel="KL divergence, nats per token")
    axes.legend()
    tenth = [loss for size, loss in mixture.curve if size <= 1.1 * mixture.bytes]
    better = min(tenth, default=mixture.predicted)
    gain = 100 * (1 - min(1, better / mixture.predicted)) if mixture.predicted else 0
    found = ", ".join(f"{value:.3g} on {name}" for name, value in measured.items())
    caption = (
        f"{mixture.predicted:.3g} nats per token are predicted for {mixture.bytes:,} bytes. "
        f"{f'Measured are {found}.' if found else 'aespa-pl test --kld true measures it.'} "
        f"A tenth more bytes would take away {gain:.0f} % of the predicted divergence."
    )
    return Picture(run.name, caption, figure)
