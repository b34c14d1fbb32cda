"""Draw the costs of a run: seconds by phase and block, and memory."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from aespa_pl.evaluation.table import GB
from aespa_pl.planning.words import duration
from aespa_pl.report.maps import NO_BLOCK
from aespa_pl.report.picture import HALF, PALETTE, SERIES, Picture, block_ticks, depth_axis
from aespa_pl.report.stored import StoredRun


def seconds(run: StoredRun, width: float) -> Picture:
    """Return the seconds of each phase of each block as stacked bars, and a bar of the end-to-end tuning."""
    name, title = "seconds", "Seconds by block and phase"
    blocks = [index for index, record in run.blocks.items() if record.get("seconds")]
    if not blocks:
        return Picture(name, title, NO_BLOCK)
    tuned = sum(run.tuned.get("seconds", {}).values())
    phases = _phases(run, blocks, len(SERIES) - bool(tuned))
    figure = Figure(
        figsize=(min(width, max(HALF, 4 + 0.5 * len(blocks))), 3.0), layout="constrained"
    )
    axes = figure.subplots()
    bottom = np.zeros(len(blocks))
    bars: dict[str, Any] = {
        "width": 0.8 if len(blocks) > 4 else 0.4,
        "edgecolor": PALETTE["panel"][0],
        "linewidth": 0.4,
    }
    for number, (phase, values) in enumerate(phases.items()):
        axes.bar(
            range(len(blocks)),
            values,
            bottom=bottom,
            label=phase,
            color=SERIES[number],
            **bars,
        )
        bottom += values
    if tuned:
        axes.bar(len(blocks), tuned, label="tuning the model", color=SERIES[len(phases)], **bars)
    columns = len(blocks) + bool(tuned)
    axes.set(xlabel="block", ylabel="seconds", xlim=(-0.6, max(columns, 4) - 0.4))
    axes.grid(visible=False, axis="x")
    block_ticks(axes, blocks)
    figure.legend(
        loc="outside right upper" if width > 8 else "outside lower center",
        ncols=1 if width > 8 else 4,
    )
    total = float(bottom.sum())
    longest = max(phases, key=lambda phase: float(phases[phase].sum()))
    caption = (
        f"{duration(total)} for {len(blocks)} blocks, {duration(total / len(blocks))} a block; "
        f"{100 * float(phases[longest].sum()) / total:.0f} % of it is {longest}. The slowest is block "
        f"{blocks[int(np.argmax(bottom))]} ({duration(float(bottom.max()))})."
    )
    if tuned:
        caption += f" Tuning of the model end to end, the bar on the right, took {duration(tuned)}."
    return Picture(name, title, caption, figure)


def _phases(run: StoredRun, blocks: list[int], most: int) -> dict[str, np.ndarray]:
    """Return the seconds of each phase by block, in the order of the work.

    Where there are more than ``most`` phases, the smallest are added up.
    """
    names = list(dict.fromkeys(phase for index in blocks for phase in run.blocks[index]["seconds"]))
    values = {
        phase: np.array([run.blocks[index]["seconds"].get(phase, 0.0) for index in blocks], float)
        for phase in names
    }
    largest = sorted(names, key=lambda phase: float(values[phase].sum()), reverse=True)
    kept = largest[: most - 1] if len(names) > most else largest
    phases = {phase: values[phase] for phase in names if phase in kept}
    rest = [values[phase] for phase in names if phase not in kept]
    return phases | ({"other": np.sum(rest, axis=0)} if rest else {})


def memory(run: StoredRun, width: float) -> Picture:
    """Return the peak of the memory over the blocks, or only its highest value."""
    name, title = "memory", "Peak memory"
    peaks = {
        index: record["peak_bytes"]
        for index, record in run.blocks.items()
        if "peak_bytes" in record
    }
    whole = run.metrics.get("peak_bytes", {})
    sentence = " ".join(
        f"The run took {whole[place] / GB:.2f} GB of {place} memory at its peak."
        for place in ("host", "device")
        if whole.get(place)
    )
    if not peaks:
        missing = "The course over the blocks is not stored by this run."
        return Picture(name, title, f"{sentence} {missing}".strip())
    figure = Figure(figsize=(width, 2.6), layout="constrained")
    axes = figure.subplots()
    for number, place in enumerate(("host", "device")):
        values = {index: peak[place] / GB for index, peak in peaks.items() if peak.get(place)}
        if values:
            line = axes.plot(
                list(values), list(values.values()), label=place, color=SERIES[number]
            )[0]
            line.set_linestyle(("-", "--")[number])
    axes.set(ylabel="peak memory (GB)", ylim=(0, None))
    depth_axis(axes)
    figure.legend(loc="outside lower center", ncols=2)
    first, last = peaks[min(peaks)], peaks[max(peaks)]
    growth = (last["host"] - first["host"]) / GB
    return Picture(
        name,
        title,
        f"{sentence} From the first to the last block the host's peak grows by {growth:.2f} GB.".strip(),
        figure,
    )
