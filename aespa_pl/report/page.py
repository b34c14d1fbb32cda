"""Make the page: sections of figures and tables about one run, or about several side by side."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from aespa_pl import __version__
from aespa_pl.evaluation.table import ABSENT, KINDS, TextTable, joined_results
from aespa_pl.planning.words import duration
from aespa_pl.report import costs, grids, losses, maps, results, tuning
from aespa_pl.report.picture import HALF, PALETTE, WIDE, Picture, for_page, style
from aespa_pl.report.stored import StoredRun

PLACES = ("output.folder", "output.name")
"""Settings in which any two runs differ, so that the page leaves them out."""


@dataclass(frozen=True)
class Section:
    """Holds figures that answer one question: one figure for all runs, or one for each."""

    about: str
    """Words on what the figures show, and how to read them."""
    pictures: Sequence[Picture]
    runs: Sequence[StoredRun] = ()
    """Run of each picture; empty if the picture is about all runs."""
    numbers: Mapping[str, TextTable] = field(default_factory=dict)
    """Tables of what the figure shows, by run, for those who cannot see it."""
    long: bool = False
    """Whether the section may be higher than a printed page."""


def sections(runs: Sequence[StoredRun]) -> list[Section]:
    """Draw all figures of some runs, in the order of the page."""
    width = WIDE if len(runs) == 1 else HALF
    final = maps.limits_of([maps.final_ratios(run) for run in runs])
    moved = maps.limits_of([maps.moved_shares(run)[0] for run in runs])

    def each(about: str, draw: Callable[[StoredRun], Picture], **kwargs: Any) -> Section:
        return Section(about, [draw(run) for run in runs], runs, **kwargs)

    with style():
        page = [
            Section(
                "Perplexity is the exponential of the mean negative log likelihood of held-out text.",
                [results.perplexities(runs)],
            ),
            Section(
                "Accuracies by the rules of lm-evaluation-harness, with standard errors over the items.",
                [results.accuracies(runs)],
            ),
            each(
                "Where the model suffers: the loss that steps 2 to 4 minimize, with the descent's integers "
                "(before a tuning), divided by its value with nearest rounding on the same grid. Brighter "
                "is worse.",
                lambda run: maps.final_loss_map(run, width, final),
                numbers={run.name: loss_table(run) for run in runs},
            ),
            each(
                "The reconstruction loss while the rounding is learned, divided by nearest rounding's loss.",
                lambda run: losses.loss_curves(run, width),
                long=True,
            ),
            each(
                "The error of the hidden states behind each block, relative to their size in the original "
                "model, with and without what came after the rounding.",
                lambda run: results.output_errors(run, width),
            ),
            each(
                "What tuning a block as a whole changes, on segments that it does not learn from.",
                lambda run: tuning.tuning_errors(run, width),
            ),
            each(
                "Whether tuning still gains, or learns its segments by heart: then the line rises.",
                lambda run: tuning.tuning_curves(run, width),
            ),
            each(
                "The share of weights whose integer is not the nearest one: how much the method has decided "
                "otherwise.",
                lambda run: maps.moved_map(run, width, moved),
            ),
            each(
                "The size of a step between two integers, by projection and depth.",
                lambda run: grids.scales(run, width),
                long=True,
            ),
            each(
                "The integer that stands for the weight 0.",
                lambda run: grids.zero_points(run, width),
            ),
            each(
                "Z-Fold's factors of the columns, which are folded into the operation before.",
                lambda run: grids.zetas(run, width),
            ),
            each(
                "How the soft roundings of one projection decide: 0 rounds down, 1 rounds up.",
                lambda run: grids.rounding_variables(run, width),
            ),
            each("Wall-clock seconds.", lambda run: costs.seconds(run, width)),
            each(
                "The most memory that the process had: weights, statistics and hidden states.",
                lambda run: costs.memory(run, width),
            ),
        ]
        if len(runs) > 1:
            by_depth = losses.loss_by_depth(runs)
            page.insert(2, Section("The heat maps below, averaged over projections.", [by_depth]))
    return page


def render(runs: Sequence[StoredRun], drawn: Sequence[Section]) -> str:
    """Return the page as one self-contained HTML document."""
    environment = Environment(
        loader=PackageLoader("aespa_pl.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    described = [_section(section) for section in drawn]
    return environment.get_template("page.html").render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs side by side",
        palette=PALETTE,
        version=__version__,
        runs=[
            {
                "name": run.name,
                "folder": run.folder,
                "verdict": results.verdict(run),
                "where": where_lost(run),
                "notes": run.notes,
                "command": run.command,
            }
            for run in runs
        ],
        sections=[section for section in described if any(p["svg"] for p in section["pictures"])],
        missing=[
            picture
            for section in described
            if not any(p["svg"] for p in section["pictures"])
            for picture in section["pictures"]
        ],
        differences=differences(runs),
        results=result_table(runs),
        facts=fact_table(runs),
        settings=_by_key(runs, [run.settings for run in runs]),
        versions=_by_key(runs, [run.versions for run in runs]),
    )


def write_figures(drawn: Sequence[Section], folder: Path, kind: str) -> list[Path]:
    """Write each figure as a file of its own.

    Args:
        drawn: Sections of the page.
        folder: Folder of the files, which is made if it is not there.
        kind: ``svg`` or ``png``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for section in drawn:
        for number, picture in enumerate(section.pictures):
            if picture.figure is not None:
                path = folder / f"{_id(section, number)}.{kind}"
                path.write_bytes(picture.png if kind == "png" else picture.svg.encode())
                paths.append(path)
    return paths


def where_lost(run: StoredRun) -> str:
    """Return which projections keep most of nearest rounding's loss, in one sentence."""
    ratios = maps.final_ratios(run)
    if not ratios:
        return "Where it was lost is not known: no block is finished."
    worst = sorted(ratios, key=ratios.__getitem__, reverse=True)[:3]
    names = ", ".join(f"{key[1]} of block {key[0]} ({ratios[key]:.2f})" for key in worst)
    return f"Most of nearest rounding's loss is left in {names}; 1 is nearest rounding's own."


def differences(runs: Sequence[StoredRun]) -> TextTable:
    """Return the settings in which the runs differ, without where they were written to."""
    table = _by_key(runs, [run.settings for run in runs])
    rows = [row for row in table.rows if len(set(row[1:])) > 1 and row[0] not in PLACES]
    return TextTable(table.head, rows, numbers=False)


def result_table(runs: Sequence[StoredRun]) -> TextTable:
    """Return what was measured, a row for each model."""
    return joined_results(
        [
            (run.metrics, {kind: results.row_name(runs, run.name, kind) for kind in KINDS})
            for run in runs
        ]
    )


def fact_table(runs: Sequence[StoredRun]) -> TextTable:
    """Return size and time of each run."""
    rows = []
    for run in runs:
        seconds = run.metrics.get("seconds", {}).get("quantization")
        bits, weights = run.shape.get("bits_per_weight"), run.shape.get("weights")
        rows.append(
            [
                run.name,
                str(len(run.blocks)),
                f"{weights:,.0f}" if weights else ABSENT,
                f"{bits:.3f}" if bits else ABSENT,
                duration(seconds) if seconds is not None else ABSENT,
            ]
        )
    head = ("", "blocks finished", "their weights", "bits per weight, with scales", "time")
    return TextTable(head, rows)


def loss_table(run: StoredRun) -> TextTable:
    """Return the final loss relative to nearest rounding by block and projection."""
    ratios = maps.final_ratios(run)
    names = [name for name in run.projections if any(key[1] == name for key in ratios)]
    rows = [
        [
            str(block),
            *(
                f"{ratios[block, name]:.3f}" if (block, name) in ratios else ABSENT
                for name in names
            ),
        ]
        for block in sorted({block for block, _ in ratios})
    ]
    return TextTable(["block", *names], rows)


def _section(section: Section) -> dict[str, Any]:
    pictures = []
    for number, picture in enumerate(section.pictures):
        name = _id(section, number)
        drawn = Markup(for_page(picture.svg, name)) if picture.figure is not None else None  # noqa: S704
        run = section.runs[number].name if len(section.runs) > 1 else None
        title = picture.title
        pictures.append(
            {
                "id": name,
                "name": picture.name,
                "title": title,
                "caption": picture.caption,
                "run": run,
                "svg": drawn,
            }
        )
    return {
        "about": section.about,
        "pictures": pictures,
        "numbers": section.numbers if any(table.rows for table in section.numbers.values()) else {},
        "long": section.long,
    }


def _id(section: Section, number: int) -> str:
    name = section.pictures[number].name
    return name if len(section.pictures) == 1 else f"{name}-{number + 1}"


def _by_key(runs: Sequence[StoredRun], columns: Sequence[Mapping[str, Any]]) -> TextTable:
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = [[key, *(str(column.get(key, ABSENT)) for column in columns)] for key in keys]
    return TextTable(["", *(run.name for run in runs)], rows, numbers=False)
