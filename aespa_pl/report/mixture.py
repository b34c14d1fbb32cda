"""Draw what was chosen for a size: the widths of all projections, and size against predicted divergence."""

import numpy as np
from matplotlib.figure import Figure

from aespa_pl.export.gguf_bytes import BLOCK_TYPES
from aespa_pl.report.maps import heat_map
from aespa_pl.report.picture import HALF, SERIES, Picture
from aespa_pl.report.stored import StoredRun
from aespa_pl.run.schema import ShownMixture
from aespa_pl.sizing.choose import counted

WIDTHS = (2.0, 8.5)
"""Bits of a weight at the ends of the colours."""
CURVE_SHARE = 1.5
"""Largest size of the curve beside the chosen one: beyond it the divergence is nearly 0."""


def width_map(run: StoredRun, mixture: ShownMixture, width: float) -> Picture:
    """Return the heat map of the bits that each projection has; ``width`` is the figure's largest."""
    bits, ends = dict[tuple[int, str], float](), list[str]()
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


def size_curve(run: StoredRun, mixture: ShownMixture, width: float) -> Picture:
    """Return size against predicted divergence, with llama.cpp's mixtures as points."""
    scale, unit = (1e9, "GB") if mixture.bytes >= 1e9 else (1e6, "MB")
    figure = Figure(figsize=(min(width, HALF), 3.2), layout="constrained")
    axes = figure.subplots()
    most = CURVE_SHARE * mixture.bytes
    sizes, losses = zip(*(p for p in mixture.curve if p[0] <= most), strict=True)
    axes.semilogy(np.array(sizes) / scale, losses, color=SERIES[0], label="best choice")
    axes.plot(mixture.bytes / scale, mixture.predicted, "o", color=SERIES[0], label="this run")
    # several names may have the same types, because rows are no whole blocks: the first one stands for them
    shown = {p: name for name, p in reversed(mixture.others.items()) if p[0] <= most}
    for (size, loss), name in shown.items():
        axes.plot(size / scale, loss, "s", color=SERIES[1])
        axes.annotate(name, (size / scale, loss), (4, 3), textcoords="offset points", fontsize=7)
    if shown:
        axes.plot([], [], "s", color=SERIES[1], label="llama.cpp's mixtures")
    for name, value in _measured(run).items():
        axes.plot(mixture.bytes / scale, value, "x", color=SERIES[2], label=f"measured, {name}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")  # what is less than a decade has no major ticks
    axes.set(xlabel=f"file, {unit}", ylabel="KL divergence, nats per token")
    axes.legend()
    return Picture(run.name, _caption(run, mixture), figure)


def _caption(run: StoredRun, mixture: ShownMixture) -> str:
    """Return the prediction, what was measured, and what a tenth more bytes would buy."""
    tenth = 1.1 * mixture.bytes
    better = min((loss for size, loss in mixture.curve if size <= tenth), default=mixture.predicted)
    gain = 100 * (1 - min(1, better / mixture.predicted)) if mixture.predicted else 0
    found = ", ".join(f"{value:.3g} on {name}" for name, value in _measured(run).items())
    measured = f"Measured are {found}." if found else "aespa-pl test --kld true measures it."
    return (
        f"{mixture.predicted:.3g} nats per token are predicted for {mixture.bytes:,} bytes. {measured} "
        f"A tenth more bytes would take away {gain:.0f} % of the predicted divergence."
    )


def _measured(run: StoredRun) -> dict[str, float]:
    """Return the measured divergence on each text."""
    of_texts = run.metrics.get("divergence", {}).get("quantized", {})
    return {name: values["mean"] for name, values in of_texts.items() if values.get("mean")}
