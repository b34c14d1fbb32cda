"""Give figures their look: colours for light and dark, for the colour-blind, on the page and in files."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

WIDE, HALF = 11.6, 5.7
"""Widths in inches of a full row of the page, and of half of one, at 100 pixels an inch."""

PALETTE = {
    "ink": ("#1b1f24", "#e8eaed"),
    "muted": ("#59626f", "#a9b1bd"),
    "grid": ("#dde1e6", "#343b45"),
    "panel": ("#fefefe", "#171b20"),
    # Okabe and Ito's colours, told apart with any kind of colour vision; darker on white, lighter on black
    "series-0": ("#0072b2", "#56b4e9"),
    "series-1": ("#d55e00", "#ff9a56"),
    "series-2": ("#008f68", "#3ad6a6"),
    "series-3": ("#b0568b", "#eda5cd"),
    "series-4": ("#9a7000", "#f0d264"),
    "series-5": ("#5b5f97", "#b3b6ef"),
    "series-6": ("#7d8793", "#c3cad3"),
}
"""Colours by name: on a light page (and in files), and on a dark one."""
DEPTHS = 8
"""Number of colours of the ramp from the first to the last block."""
_viridis = mpl.colormaps["viridis"]
PALETTE |= {
    f"depth-{step}": (
        to_hex(_viridis(0.82 * step / (DEPTHS - 1))),
        to_hex(_viridis(0.3 + 0.7 * step / (DEPTHS - 1))),
    )
    for step in range(DEPTHS)
}
SERIES = tuple(light for name, (light, _) in PALETTE.items() if name.startswith("series-"))
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HEAT = "cividis"
"""Colour map of heat maps, made for the colour-blind; brighter is more."""


@dataclass(frozen=True)
class Picture:
    """Holds a figure with its conclusion, or the reason why there is none."""

    name: str
    """Id on the page, and name of the file."""
    title: str
    caption: str
    """Conclusion from the data; without a figure, a sentence on what is missing, and what to do."""
    figure: Figure | None = None

    @cached_property
    def svg(self) -> str:
        """Return the figure as an SVG document, in the colours of a light page."""
        return self._saved("svg").decode()

    @cached_property
    def png(self) -> bytes:
        """Return the figure as a PNG file, in the colours of a light page."""
        return self._saved("png")

    def _saved(self, kind: str) -> bytes:
        if self.figure is None:
            raise ValueError(f"{self.name} has no figure")
        file = io.BytesIO()
        with style():  # fonts of SVG text are chosen while it is written
            metadata = {"Date": None} if kind == "svg" else None
            self.figure.savefig(file, format=kind, dpi=110, metadata=metadata)
        return file.getvalue()


@contextmanager
def style() -> Iterator[None]:
    """Draw in our colours and sizes for the time of this context."""
    ink, muted, grid, panel = (PALETTE[name][0] for name in ("ink", "muted", "grid", "panel"))
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",  # text stays text: it can be searched, and is read aloud
        "svg.hashsalt": "aespa_pl",  # the same figure gives the same file
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.titlelocation": "left",
        "axes.labelsize": 9,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "legend.fontsize": 8,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.titlecolor": ink,
        "axes.edgecolor": muted,
        "xtick.color": muted,
        "ytick.color": muted,
        "grid.color": grid,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.facecolor": panel,
        "axes.facecolor": panel,
        "legend.frameon": False,
        "lines.linewidth": 1.3,
    }
    with mpl.rc_context(settings):
        yield


def for_page(svg: str, name: str) -> str:
    """Return an SVG document as an element of the page: its colours follow the page's.

    Args:
        svg: Document from ``Picture.svg``.
        name: Text before all ids, because an id may occur only once on a page.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for colour, (light, _) in PALETTE.items():
        svg = svg.replace(light, f"var(--{colour})")
    width = float(re.search(r'viewBox="0 0 ([\d.]+) ', svg)[1]) / 72  # type: ignore[index]
    return re.sub(
        r'<svg ([^>]*?)width="[^"]*"|<svg (?=[^>]*?width=)',
        rf'<svg \1 style="width: {100 * width:.0f}px"',
        svg,
        count=1,
    )


def depth_colour(position: int, count: int) -> str:
    """Return the colour of the block at ``position`` of ``count`` blocks."""
    return PALETTE[f"depth-{depth_step(position, count)}"][0]


def depth_step(position: int, count: int) -> int:
    """Return the step of the ramp, 0 to DEPTHS - 1, that a block's colour is."""
    return (
        round(position * (DEPTHS - 1) / max(count - 1, 1))
        if count < DEPTHS
        else (position * DEPTHS // count)
    )


def on_heat(share: float) -> str:
    """Return white or black, whichever can be read on the heat map at ``share`` of its range."""
    red, green, blue, _ = mpl.colormaps[HEAT](share)
    return "#ffffff" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "#000000"


def block_ticks(axes: Axes, blocks: list[int], most: int = 12) -> None:
    """Label the x axis with block numbers, at most ``most`` of them."""
    step = int(np.ceil(len(blocks) / most))
    axes.set_xticks(range(0, len(blocks), step), [str(block) for block in blocks[::step]])


def depth_axis(axes: Axes) -> None:
    """Label the x axis with block numbers where they are its values."""
    axes.set_xlabel("block")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def value_axis(axes: Axes) -> None:
    """Make the y axis logarithmic where the values span a decade, with labels at 1, 2 and 5."""
    low, high = axes.get_ylim()
    lowest = min((float(np.min(line.get_ydata())) for line in axes.lines), default=low)
    if lowest <= 0 or high / lowest < 10:
        return
    logarithmic_axis(axes, axes.yaxis)


def logarithmic_axis(axes: Axes, axis: XAxis | YAxis) -> None:
    """Make one of the axes logarithmic, with labels at 1, 2 and 5."""
    if axis is axes.xaxis:
        axes.set_xscale("log")
    else:
        axes.set_yscale("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def panels(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``count`` panels, four in a row, or two in one of half the page's width.

    Args:
        count: Number of panels.
        width: Width of the figure in inches.
        height: Height of one row of panels in inches.
    """
    columns = min(4 if width > HALF else 2, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(width, rows * height + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, list(axes[:count])


def block_names(blocks: list[int]) -> str:
    """Return ``block 3`` or ``blocks 3 to 8``."""
    if len(blocks) == 1:
        return f"block {blocks[0]}"
    return f"blocks {blocks[0]} to {blocks[-1]}"
