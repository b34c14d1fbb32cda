"""Draw losses over the iterations of a block, and over the blocks of several runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from aespa_pl.curve_names import RECONSTRUCTION
from aespa_pl.report.curves import Floats
from aespa_pl.report.maps import NO_BLOCK, final_ratios
from aespa_pl.report.picture import (
    DEPTHS,
    MARKERS,
    SERIES,
    STYLES,
    WIDE,
    Picture,
    block_names,
    depth_axis,
    depth_colour,
    depth_step,
    panels,
    value_axis,
)
from aespa_pl.report.stored import StoredRun

NOT_LEARNED = "Not stored by this run: its method learns no rounding, or trainer.logger is false."


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
    depth_legend(figure, blocks)
    return Picture(name, title, _curves_caption(run, relative), figure)


def depth_legend(figure: Figure, blocks: list[int]) -> None:
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
