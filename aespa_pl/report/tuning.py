"""Figures of tuning: the error on held-back segments before and after it, and on its way."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from aespa_pl.report.curves import Curve
from aespa_pl.report.losses import depth_legend
from aespa_pl.report.maps import NO_BLOCK
from aespa_pl.report.picture import (
    DEPTHS,
    MARKERS,
    SERIES,
    STYLES,
    Picture,
    depth_axis,
    depth_colour,
    logarithmic_axis,
    value_axis,
)
from aespa_pl.report.stored import StoredRun

NOT_TUNED = "Not stored by this run: its method tunes no blocks, or none was tuned yet."
NO_CURVE = "Not stored by this run: its method tunes no blocks, or trainer.logger is false."
HELD_BACK = "held_back_error"
"""Of the group ``tuning`` among a block's curves."""
LINES = ("before tuning", "after tuning")


def tuning_errors(run: StoredRun, width: float) -> Picture:
    """Return each block's error on held-back segments before and after its tuning."""
    name, title = "tuning", "Error of each block before and after its tuning"
    records = {
        index: (float(found["start_error"]), float(found["error"]))
        for index, record in run.blocks.items()
        if (found := record.get("tuning")) and found["start_error"] and found["error"]
    }
    if not run.blocks:
        return Picture(name, title, NO_BLOCK)
    if not records:
        return Picture(name, title, NOT_TUNED)
    errors = np.array(list(records.values()))
    figure = Figure(figsize=(width, 3.2), layout="constrained")
    axes = figure.subplots()
    for number, label in enumerate(LINES):
        axes.plot(
            list(records),
            errors[:, number],
            label=label,
            color=SERIES[number],
            linestyle=STYLES[number],
            marker=MARKERS[number] if len(records) <= 2 * DEPTHS else "",
        )
    axes.set(ylabel="‖output - original‖² / ‖original‖²\non held-back segments")
    if errors.max() > 10 * errors.min():
        logarithmic_axis(axes, axes.yaxis)
    else:
        value_axis(axes)
    depth_axis(axes)
    figure.legend(loc="outside lower center", ncols=2)
    return Picture(name, title, _caption(run, records), figure)


def _caption(run: StoredRun, records: dict[int, tuple[float, float]]) -> str:
    shares = {index: after / before for index, (before, after) in records.items()}
    most, least = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    caption = (
        f"Tuning leaves {np.median(list(shares.values())):.2f} of a block's error (median), least in block "
        f"{most} ({shares[most]:.2f}), most in block {least} ({shares[least]:.2f})."
    )
    found = run.tuned
    if found.get("start_error") and found.get("error"):
        caption += (
            f" Tuning of the model end to end then took its error from {found['start_error']:.3g} to "
            f"{found['error']:.3g}."
        )
    return caption


def tuning_curves(run: StoredRun, width: float) -> Picture:
    """Return the held-back error after each epoch relative to its start, a line for each tuned block."""
    name, title = "tuning-curves", "Error on held-back segments during tuning"
    starts = {
        index: float(found["start_error"])
        for index, record in run.blocks.items()
        if (found := record.get("tuning")) and found["start_error"]
    }
    curves = {
        block: Curve(np.append(0, curve.steps), np.append(1, curve.values / starts[block]))
        for (block, what), curve in sorted(run.curves.of("tuning").items())
        if what == HELD_BACK and block in starts
    }
    if not curves:
        return Picture(name, title, NO_CURVE if run.blocks else NO_BLOCK)
    figure = Figure(figsize=(width, 3.4), layout="constrained")
    axes = figure.subplots()
    blocks = list(curves)
    for position, block in enumerate(blocks):
        style: dict[str, Any] = {"color": depth_colour(position, len(blocks))}
        axes.plot(curves[block].steps, curves[block].values, marker=_marker(curves[block]), **style)
    axes.set(xlabel="step", ylabel="error / error before tuning")
    value_axis(axes)
    depth_legend(figure, blocks)
    return Picture(name, title, _curves_caption(curves), figure)


def _marker(curve: Curve) -> str:
    return "." if len(curve.steps) <= 20 else ""


def _curves_caption(curves: dict[int, Curve]) -> str:
    ends = [float(curve.values[-1]) for curve in curves.values()]
    rising = sum(curve.values[-1] > 1.001 * curve.values.min() for curve in curves.values())
    return (
        f"The last epoch ends at {np.median(ends):.2f} of the error before tuning (median of {len(ends)} "
        f"blocks). In {rising} of them an earlier epoch was better by more than 0.1 %; each block keeps its "
        "best epoch."
    )
