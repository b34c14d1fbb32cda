"""Make the page: tables and maps about one run, or about several side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from aespa_pl import __version__
from aespa_pl.report import maps, mixture, results
from aespa_pl.report.picture import HALF, PALETTE, WIDE, Picture, for_page, style
from aespa_pl.report.stored import StoredRun


@dataclass(frozen=True)
class Section:
    """Holds one kind of map, of every run."""

    about: str
    """Words on what the maps show, and how to read them."""
    pictures: Sequence[Picture]

    def id(self, number: int) -> str:
        """Return the id of a picture, which is also the name of its file."""
        name = self.pictures[number].name
        return name if len(self.pictures) == 1 else f"{name}-{number + 1}"

    def svg(self, number: int) -> Markup | None:
        """Return a picture as an element of the page, None where it has no figure."""
        picture = self.pictures[number]
        if picture.figure is None:
            return None
        return Markup(for_page(picture.svg, self.id(number)))  # noqa: S704 - matplotlib escapes


def sections(runs: Sequence[StoredRun]) -> list[Section]:
    """Draw the maps of some runs, in the order of the page."""
    width = WIDE if len(runs) == 1 else HALF
    final = maps.limits_of([*map(maps.final_ratios, runs)])
    moved = maps.limits_of([*map(maps.moved_integers, runs)])
    with style():
        return [
            *_of_sizes(runs, width),
            Section(
                "Where the model suffers: the loss that steps 2 to 4 minimize, with the descent's integers "
                "(before a tuning), divided by its value with nearest rounding on the same grid. Brighter "
                "is worse.",
                [maps.final_loss_map(run, width, final) for run in runs],
            ),
            Section(
                "How much the method has decided otherwise than nearest rounding on the same grid.",
                [maps.moved_map(run, width, moved) for run in runs],
            ),
        ]


def _of_sizes(runs: Sequence[StoredRun], width: float) -> list[Section]:
    """Draw what was chosen for a size; nothing where no run has a target."""
    sized = [run for run in runs if run.mixture is not None]
    if not sized:
        return []
    return [
        Section(
            "What quantization.target has chosen, so that the end loss suffers least: the bits that a weight "
            "takes.",
            [mixture.width_map(run, width) for run in sized],
        ),
        Section(
            "What more bytes would buy: the least divergence that is predicted at each size of the file.",
            [mixture.size_curve(run, width) for run in sized],
        ),
    ]


def render(runs: Sequence[StoredRun], drawn: Sequence[Section]) -> str:
    """Return the page as one self-contained HTML document."""
    environment = Environment(
        loader=PackageLoader("aespa_pl.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs side by side",
        palette=PALETTE,
        version=__version__,
        runs=[
            {
                "name": run.name,
                "folder": run.folder,
                "verdict": results.verdict(run),
                "where": results.where_lost(run),
                "notes": run.notes,
                "command": run.command,
                "blocks": results.block_table(run),
            }
            for run in runs
        ],
        sections=drawn,
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
                content = picture.svg.encode() if kind == "svg" else picture.saved(kind)
                (folder / f"{section.id(number)}.{kind}").write_bytes(content)
