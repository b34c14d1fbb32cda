"""Draw scales, zero points, zeta, and the rounding variables over the iterations."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aespa_pl.curve_names import ROUNDING_VARIABLES
from aespa_pl.report.curves import Floats
from aespa_pl.report.maps import NO_BLOCK, heat_map, limits_of
from aespa_pl.report.picture import HEAT, SERIES, Picture, block_ticks, panels, value_axis
from aespa_pl.report.stored import GridTensors, StoredRun

QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)


def scales(run: StoredRun, width: float) -> Picture:
    """Return the distribution of the scales over depth, a panel for each projection."""
    found = _by_name(run, lambda tensors: tensors.scale)
    name, title = "scales", "Scales"
    if not found:
        return Picture(name, title, NO_BLOCK)
    figure = _bands(found, width, "scale (unit of the weight)")
    medians = {key: np.median(values) for key, rows in found.items() for values in rows.values()}
    widest = max(medians, key=medians.__getitem__)
    spreads = [_spread(values) for rows in found.values() for values in rows.values()]
    caption = (
        f"Within a projection of a block the largest twentieth of the scales is "
        f"{np.median(spreads):.1f} times the smallest twentieth (median; {max(spreads):.1f} at most). "
        f"The largest typical scale is in {widest} ({medians[widest]:.3g}): there a step of one integer "
        "changes a weight most."
    )
    return Picture(name, title, caption, figure)


def zetas(run: StoredRun, width: float) -> Picture:
    """Return the distribution of zeta over depth, a panel for each group of projections."""
    found = _by_name(run, lambda tensors: tensors.zeta)
    name, title = "zeta", "Column factors zeta"
    if not found:
        return Picture(
            name,
            title,
            "Not stored by this run: quantization.grid.zfold is off." if run.blocks else NO_BLOCK,
        )
    spreads = {
        (key, block): _spread(values)
        for key, rows in found.items()
        for block, values in rows.items()
    }
    widest = max(spreads, key=spreads.__getitem__)
    caption = (
        f"Zeta evens out the columns most in {widest[0]} of block {widest[1]}, where its largest twentieth "
        f"is {spreads[widest]:.1f} times its smallest; {np.median(list(spreads.values())):.1f} times is "
        "typical. A value of 1 leaves a column as it is."
    )
    return Picture(name, title, caption, _bands(found, width, "zeta"))


def zero_points(run: StoredRun, width: float) -> Picture:
    """Return how often each zero point occurs, a row for each projection, over all finished blocks."""
    found = _by_name(run, lambda tensors: tensors.zero_point)
    name, title = "zero-points", "Zero points"
    if not found:
        return Picture(name, title, NO_BLOCK)
    pooled = {key: np.concatenate(list(rows.values())) for key, rows in found.items()}
    everything = np.concatenate(list(pooled.values()))
    low, high = int(everything.min()), int(everything.max())
    values = range(low, high + 1)
    shares = {
        (value, key): float(np.mean(points == value))
        for key, points in pooled.items()
        for value in values
    }
    figure = heat_map(
        shares, list(pooled), width, (0.0, limits_of([shares])[1]), "share of channels\nor groups"
    )
    figure.axes[0].set_xlabel("zero point (integer that stands for 0)")
    commonest = max(values, key=lambda value: np.mean(everything == value))
    caption = (
        f"{100 * np.mean(everything == commonest):.0f} % of the zero points are {commonest}; they lie "
        f"between {low} and {high}."
    )
    return Picture(name, title, caption, figure)


def rounding_variables(run: StoredRun, width: float) -> Picture:
    """Return h(B) over the iterations of the first projection that it was logged for."""
    series = run.curves.histograms.get(ROUNDING_VARIABLES, {})
    name, title = "rounding-variables", "Rounding variables h(B) over iterations"
    if not series:
        return Picture(
            name,
            title,
            "Not stored by this run. A method that learns the rounding step by step (aespa, adaround) logs "
            "it for chosen projections with --output.histograms '[q_proj]'.",
        )
    (block, projection), histograms = sorted(series.items())[0]
    figure = Figure(figsize=(min(width, 8.0), 3.2), layout="constrained")
    axes = figure.subplots()
    mesh = axes.pcolormesh(
        _edges(histograms.steps), histograms.edges, histograms.shares.T, cmap=HEAT, vmin=0
    )
    axes.grid(visible=False)
    axes.set(xlabel="iteration", ylabel="h(B): 0 rounds down, 1 rounds up")
    figure.colorbar(mesh, ax=axes, label="share of weights", pad=0.02)
    decided = histograms.shares[:, 0] + histograms.shares[:, -1]
    caption = (
        f"{projection} of block {block}: at iteration {histograms.steps[0]:.0f}, "
        f"{100 * decided[0]:.0f} % of the weights lie within {histograms.edges[1]:.2f} of an integer, "
        f"{100 * decided[-1]:.0f} % at iteration {histograms.steps[-1]:.0f}."
    )
    return Picture(name, title, caption, figure)


def _edges(steps: Floats) -> Floats:
    """Return the borders of the columns whose middles are ``steps``."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middles = (steps[1:] + steps[:-1]) / 2
    return np.concatenate([[2 * steps[0] - middles[0]], middles, [2 * steps[-1] - middles[-1]]])


def _by_name(
    run: StoredRun, part: Callable[[GridTensors], Floats | None]
) -> dict[str, dict[int, Floats]]:
    """Return one kind of tensor by projection or group, and by block."""
    found: dict[str, dict[int, Floats]] = {}
    for (block, name), tensors in run.grids.items():
        values = part(tensors)
        if values is not None:
            found.setdefault(name, {})[block] = values.ravel()
    order = run.projections
    return dict(
        sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else 0)
    )


def _spread(values: Floats) -> float:
    """Return the ratio of the 95 % quantile to the 5 % quantile."""
    low, high = np.quantile(values, [0.05, 0.95])
    return float(high / max(low, 1e-12))


def _bands(found: dict[str, dict[int, Floats]], width: float, label: str) -> Figure:
    """Return panels with the median, the middle 90 % and the range over depth, on a logarithmic axis."""
    figure, axes = panels(len(found), width, 1.6)
    for panel, (name, rows) in zip(axes, found.items(), strict=True):
        _band(panel, rows)
        panel.set(title=name, xlabel="block")
        value_axis(panel)
    figure.supylabel(label, fontsize=9)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _band(axes: Axes, rows: dict[int, Floats]) -> None:
    blocks: Sequence[int] = sorted(rows)
    places = np.arange(len(blocks))
    quantiles = np.array([np.quantile(rows[block], QUANTILES) for block in blocks]).T
    lowest, low, median, high, highest = np.maximum(quantiles, 1e-12)
    colour = SERIES[0]
    if len(blocks) == 1:  # a band of one block has no width
        places, (lowest, low, median, high, highest) = (
            np.array([-0.3, 0.3]),
            (np.repeat(row, 2) for row in (lowest, low, median, high, highest)),
        )
    axes.fill_between(places, lowest, highest, color=colour, alpha=0.15, linewidth=0, label="all")
    axes.fill_between(places, low, high, color=colour, alpha=0.35, linewidth=0, label="middle 90 %")
    axes.plot(
        places,
        median,
        color=colour,
        label="median",
        marker="o" if len(blocks) < 13 else "",
        markersize=3,
    )
    block_ticks(axes, list(blocks), most=6)
