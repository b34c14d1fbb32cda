"""Give figures their look: colours for light and dark, for the colour-blind, on the page and in files."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

WIDE, HALF = 11.6, 5.7
"""Widths in inches of a full row of the page, and of half of one, at 100 pixels an inch."""

PALETTE = {
    "ink": ("#1b1f24", "#e8eaed"),
    "muted": ("#59626f", "#a9b1bd"),
    "grid": ("#dde1e6", "#343b45"),
    "panel": ("#fefefe", "#171b20"),
    "warning": ("#d55e00", "#ff9a56"),
}
"""Colours by name: on a light page (and in files), and on a dark one."""
SERIES = ("#0072b2", "#d55e00", "#008f68", "#b0568b", "#9a7000", "#5b5f97", "#7d8793")
"""Okabe and Ito's colours, darker: they are told apart with any kind of colour vision."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HEAT = "cividis"
"""Colour map of heat maps, made for the colour-blind; brighter is more."""


@dataclass(frozen=True)
class Picture:
    """Holds a figure with its conclusion, or the reason why there is none."""

    run: str
    """Name of the run that it is about."""
    caption: str
    """Conclusion from the data; without a figure, a sentence on what is missing, and what to do."""
    figure: Figure | None = None


def saved(figure: Figure, kind: str) -> bytes:
    """Return a figure as a file (``svg`` or ``png``), in the colours of a light page."""
    file = io.BytesIO()
    with style():  # fonts of SVG text are chosen while it is written
        figure.savefig(file, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else None)
    return file.getvalue()


@contextmanager
def style() -> Iterator[None]:
    """Draw in our colours and sizes for the time of this context."""
    ink, muted, grid, panel, _ = (light for light, _ in PALETTE.values())
    settings: dict[Any, Any] = {
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), ink),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), muted),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor"), panel),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 8),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
        "text.parse_math": False,  # a dollar sign in a name is no formula
        "svg.fonttype": "none",  # text stays text: it can be searched, and is read aloud
        "svg.hashsalt": "aespa_pl",  # the same figure gives the same file
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.labelsize": 9,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": grid,
    }
    with mpl.rc_context(settings):
        yield


def for_page(figure: Figure, name: str) -> str:
    """Return a figure as an SVG element of the page, with colours that follow the page's.

    ``name`` comes before all ids, because an id may occur only once on a page.
    """
    svg = saved(figure, "svg").decode()
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
