"""Draw what tuning does: the error on held-back segments before, during and after it.

A method tunes each block as a whole, or one sublayer after the other; each unit has a panel of its own.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aespa_pl import curve_names
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
WHOLE, ATTENTION, FEED_FORWARD = "block", "attention", "feed-forward network"
CURVES = {
    WHOLE: curve_names.TUNING,
    ATTENTION: f"{curve_names.TUNING}/{curve_names.ATTENTION}",
    FEED_FORWARD: f"{curve_names.TUNING}/{curve_names.FEED_FORWARD}",
}
"""Group of the curves of each unit."""
LINES = ("before tuning", "after tuning")

Errors = Mapping[int, tuple[float, float]]
"""Error before and after the tuning of a unit, by block."""


def tuning_errors(run: StoredRun, width: float) -> Picture:
    """Return each block's error on held-back segments before and after its tuning, a panel for each unit."""
    name, title = "tuning", "Error of each block before and after its tuning"
    errors = _errors(run)
    if not run.blocks:
        return Picture(name, title, NO_BLOCK)
    if not errors:
        return Picture(name, title, NOT_TUNED)
    figure, panels = _panels(errors, width, 3.2)
    for unit, axes in panels.items():
        _draw_errors(axes, errors[unit])
    figure.supylabel(
        "squared error of a token, relative to\nits size, mean of held-back segments", fontsize=9
    )
    handles, labels = next(iter(panels.values())).get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return Picture(name, title, _caption(run, errors), figure)


def _errors(run: StoredRun) -> dict[str, Errors]:
    """Return the errors of each unit; the journal has only the errors of a block's last unit."""
    curves = _curves(run)
    last = FEED_FORWARD if ATTENTION in curves else WHOLE
    recorded = {
        index: (float(found["start_error"]), float(found["error"]))
        for index, record in run.blocks.items()
        if (found := record.get("tuning")) and found["start_error"] and found["error"]
    }
    first = {
        block: (float(curve.values[0]), float(np.nanmin(curve.values)))
        for block, curve in curves.get(ATTENTION, {}).items()
    }
    return {unit: found for unit, found in ((ATTENTION, first), (last, recorded)) if found}


def _curves(run: StoredRun) -> dict[str, dict[int, Curve]]:
    """Return the error over the steps from the start on, by unit and finished block."""
    found: dict[str, dict[int, Curve]] = {}
    for unit, group in CURVES.items():
        for (block, what), curve in sorted(run.curves.of(group).items()):
            start = (run.blocks.get(block, {}).get("tuning") or {}).get("start_error")
            if what != curve_names.HELD_BACK or not start:
                continue
            if curve.steps[0] == 0:
                found.setdefault(unit, {})[block] = curve
            # older runs have the start in the journal alone, where it is the last unit's
            elif unit != ATTENTION:
                steps, values = np.append(0, curve.steps), np.append(float(start), curve.values)
                found.setdefault(unit, {})[block] = Curve(steps, values)
    return found


def _panels(
    units: Mapping[str, Any], width: float, height: float
) -> tuple[Figure, dict[str, Axes]]:
    """Return a figure with a panel for each unit, side by side; a panel that is alone has no title."""
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = dict(zip(units, figure.subplots(1, len(units), squeeze=False)[0], strict=True))
    if len(panels) > 1:
        for unit, axes in panels.items():
            axes.set(title=unit)
    return figure, panels


def _draw_errors(axes: Axes, errors: Errors) -> None:
    values = np.array(list(errors.values()))
    for number, label in enumerate(LINES):
        axes.plot(
            list(errors),
            values[:, number],
            label=label,
            color=SERIES[number],
            linestyle=STYLES[number],
            marker=MARKERS[number] if len(errors) <= 2 * DEPTHS else "",
        )
    if values.max() > 10 * values.min():
        logarithmic_axis(axes, axes.yaxis)
    else:
        value_axis(axes)
    depth_axis(axes)


def _caption(run: StoredRun, errors: Mapping[str, Errors]) -> str:
    caption = " ".join(_unit_caption(unit, found) for unit, found in errors.items())
    found = run.tuned
    if found.get("start_error") and found.get("error"):
        caption += (
            f" Tuning of the model end to end then took its error from {found['start_error']:.3g} to "
            f"{found['error']:.3g}."
        )
    return caption


def _unit_caption(unit: str, errors: Errors) -> str:
    shares = {index: after / before for index, (before, after) in errors.items()}
    most, least = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    whose = "a block's error" if unit == WHOLE else f"the error behind the {unit}"
    return (
        f"Tuning leaves {np.median(list(shares.values())):.2f} of {whose} (median), least in block "
        f"{most} ({shares[most]:.2f}), most in block {least} ({shares[least]:.2f})."
    )


def tuning_curves(run: StoredRun, width: float) -> Picture:
    """Return the held-back error relative to its start, a panel for each unit, a line for each block."""
    name, title = "tuning-curves", "Error on held-back segments during tuning"
    curves = {
        unit: {
            block: Curve(curve.steps, curve.values / curve.values[0])
            for block, curve in found.items()
        }
        for unit, found in _curves(run).items()
    }
    if not curves:
        return Picture(name, title, NO_CURVE if run.blocks else NO_BLOCK)
    figure, panels = _panels(curves, width, 3.4)
    blocks = sorted({block for found in curves.values() for block in found})
    for unit, axes in panels.items():
        for block, curve in curves[unit].items():
            colour = depth_colour(blocks.index(block), len(blocks))
            axes.plot(curve.steps, curve.values, marker=_marker(curve), color=colour)
        axes.set(xlabel="step")
        value_axis(axes)
    figure.supylabel("error / error before tuning", fontsize=9)
    depth_legend(figure, blocks)
    return Picture(name, title, " ".join(_curves_caption(*each) for each in curves.items()), figure)


def _marker(curve: Curve) -> str:
    return "." if len(curve.steps) <= 20 else ""


def _curves_caption(unit: str, curves: Mapping[int, Curve]) -> str:
    ends = [float(curve.values[-1]) for curve in curves.values()]
    rising = sum(curve.values[-1] > 1.001 * curve.values.min() for curve in curves.values())
    subject = "The last epoch" if unit == WHOLE else f"The last epoch of the {unit}"
    return (
        f"{subject} ends at {np.median(ends):.2f} of the error before tuning (median of {len(ends)} "
        f"blocks). In {rising} of them an earlier epoch was better by more than 0.1 %; each block keeps its "
        "best epoch."
    )
