"""Make the page: tables and maps about one run, or about several side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from aespa_pl import __version__
from aespa_pl.report import maps, mixture, results
from aespa_pl.report.picture import HALF, PALETTE, WIDE, Picture, for_page, saved, style
from aespa_pl.report.stored import StoredRun


@dataclass(frozen=True)
class Section:
    """Holds one kind of picture, of every run."""

    name: str
    title: str
    about: str
    """Words on what the pictures show, and how to read them."""
    pictures: Sequence[Picture]

    def id(self, number: int) -> str:
        """Return the id of a picture, which is also the name of its file."""
        return self.name if len(self.pictures) == 1 else f"{self.name}-{number + 1}"


def sections(runs: Sequence[StoredRun]) -> list[Section]:
    """Draw the pictures of some runs, in the order of the page."""
    width = WIDE if len(runs) == 1 else HALF
    limits = maps.limits_of([*map(maps.final_ratios, runs)])
    sized = [(run, run.mixture) for run in runs if run.mixture is not None]
    with style():
        drawn = [
            Section(
                "widths",
                "Bits of a weight, by projection",
                "What quantization.target has chosen, so that the end loss suffers least: the bits that a "
                "weight takes.",
                [mixture.width_map(run, chosen, width) for run, chosen in sized],
            ),
            Section(
                "sizes",
                "Size and predicted divergence",
                "What more bytes would buy: the least divergence that is predicted at each size of the file.",
                [mixture.size_curve(run, chosen, width) for run, chosen in sized],
            ),
            Section(
                "final-loss",
                "Final loss, relative to nearest rounding",
                "Where the model suffers: the loss that steps 2 to 4 minimize, with the descent's integers "
                "(before a tuning), divided by its value with nearest rounding on the same grid. Brighter "
                "is worse.",
                [maps.final_loss_map(run, width, limits) for run in runs],
            ),
        ]
    return [section for section in drawn if section.pictures]


def render(runs: Sequence[StoredRun], drawn: Sequence[Section]) -> str:
    """Return the page as one self-contained HTML document."""
    environment = Environment(
        loader=PackageLoader("aespa_pl.report", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html").render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs side by side",
        palette=PALETTE,
        version=__version__,
        runs=runs,
        sections=drawn,
        svg=lambda figure, name: Markup(for_page(figure, name)),  # noqa: S704 - matplotlib escapes
        verdict=results.verdict,
        where_lost=results.where_lost,
        differences=results.differences(runs),
        results=results.result_table(runs),
        costs=results.cost_table(runs),
        settings=results.by_key(runs, [run.settings for run in runs]),
        versions=results.by_key(runs, [run.versions for run in runs]),
    )


def write_figures(drawn: Sequence[Section], folder: Path, kind: str) -> None:
    """Write each figure as a file of its own (``kind``: ``svg`` or ``png``); the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for section in drawn:
        for number, picture in enumerate(section.pictures):
            if picture.figure is not None:
                (folder / f"{section.id(number)}.{kind}").write_bytes(saved(picture.figure, kind))
