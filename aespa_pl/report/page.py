"""Make the page about runs: how good they are in words and tables, where they lost, and what it cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from aespa_pl import __version__
from aespa_pl.evaluation.table import (
    ABSENT,
    KINDS,
    OF_TEXTS,
    TextTable,
    joined_results,
    texts_in,
    tokens_in_words,
)
from aespa_pl.measure import duration, human
from aespa_pl.report import maps
from aespa_pl.report.picture import HALF, PALETTE, WIDE, Picture, for_page, saved, style
from aespa_pl.report.stored import StoredRun
from aespa_pl.run.schema import PHASES, TuningRecord

SIZES = (
    (-0.01, "has a lower perplexity than the original"),
    (0.01, "is as good as the original to within 1 %"),
    (0.05, "is slightly worse than the original"),
    (0.15, "is clearly worse than the original"),
    (0.50, "is much worse than the original"),
    (np.inf, "is far worse than the original"),
)
"""Words on the result, each with the largest rise of the perplexity that it is said of."""

SHORTEST = 1e-3
"""Seconds of a phase in which nothing was done, at most."""


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
                [maps.width_map(run, chosen, width) for run, chosen in sized],
            ),
            Section(
                "sizes",
                "Size and predicted divergence",
                "What more bytes would buy: the least divergence that is predicted at each size of the file.",
                [maps.size_curve(run, chosen, width) for run, chosen in sized],
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
        verdict=verdict,
        where_lost=where_lost,
        tunings=tunings,
        differences=differences(runs),
        results=result_table(runs),
        costs=costs_table(runs),
        settings=by_key(runs, [run.settings for run in runs]),
        versions=by_key(runs, [run.versions for run in runs]),
    )


def write_figures(drawn: Sequence[Section], folder: Path, kind: str) -> None:
    """Write each figure as a file of its own (``kind``: ``svg`` or ``png``); the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for section in drawn:
        for number, picture in enumerate(section.pictures):
            if picture.figure is not None:
                (folder / f"{section.id(number)}.{kind}").write_bytes(saved(picture.figure, kind))


def verdict(run: StoredRun) -> str:
    """Return how much worse the quantized model is, on the text where it loses most."""
    by_kind: Mapping[str, Mapping[str, float]] = run.metrics.get("perplexity", {})
    originals, results = by_kind.get("original", {}), by_kind.get("quantized", {})
    rises = {text: value / originals[text] - 1 for text, value in results.items() if text in originals}
    if not rises and not run.journal.metrics_file.is_file():
        return "Not measured yet: the run is not finished."
    if not rises:
        return (
            "Not measured by this run. Measure it with aespa-pl test and the run's config.yaml, with at "
            "least one text in data.evaluation.texts."
        )
    text = max(rises, key=rises.__getitem__)
    rise = rises[text]
    original, quantized, nearest = originals[text], results[text], by_kind.get("nearest", {}).get(text)
    words = next(words for limit, words in SIZES if rise <= limit)
    rest = ""
    if nearest is not None and nearest > original:
        avoided = 1 - np.log(quantized / original) / np.log(nearest / original)
        loss = f"{100 * avoided:.0f} % of its loss (in nats) is avoided"
        if avoided < 0:
            loss = f"the loss (in nats) is {-100 * avoided:.0f} % larger than by rounding to nearest"
        rest = f"; round-to-nearest would give {nearest:.2f}, so {loss}"
    change = f"from {original:.2f} to {quantized:.2f} ({100 * rise:+.0f} %)"
    return f"The quantized model {words}: on {text} the perplexity goes {change}{rest}."


def where_lost(run: StoredRun) -> str:
    """Return which projections keep most of nearest rounding's loss, in one sentence."""
    names = ", ".join(maps.worst_first(maps.final_ratios(run))[:3])
    if not names:
        return f"Where it was lost is not known: {maps.no_losses(run)}."
    most = "Before the trainings, most" if tunings(run) else "Most"
    return f"{most} of nearest rounding's loss is left in {names}; 1 is nearest rounding's own."


def tunings(run: StoredRun) -> str:
    """Return what the trainings of blocks and model gained on held-back text, in a sentence; or nothing."""
    said, journal = [], run.journal
    ratios = [_gain(block.tuning) for block in journal.blocks.values() if block.tuning is not None]
    if ratios:
        said.append(
            f"Training took the error of the blocks' outputs on held-back text to {min(ratios):.0%} to "
            f"{max(ratios):.0%} of what it was, {median(ratios):.0%} in the median block."
        )
    tuned = journal.tuned
    if tuned is not None and not tuned.epoch:
        said.append("Training end to end found nothing better there than its start.")
    elif tuned is not None and tuned.start_error and tuned.error is not None:
        change = f"from {tuned.start_error:.4g} to {tuned.error:.4g}"
        said.append(f"Training end to end took the divergence there {change}.")
    return " ".join(said)


def _gain(tuning: TuningRecord) -> float:
    if not tuning.start_error or tuning.error is None:
        return 1.0
    return tuning.error / tuning.start_error


def result_table(runs: Sequence[StoredRun]) -> TextTable:
    """Return what was measured, a row for each model."""
    measured = []
    for run, metrics in zip(runs, _texts_apart([run.metrics for run in runs]), strict=True):
        before = f"{run.name}, " if len(runs) > 1 else ""
        measured.append((metrics, {kind: before + words for kind, words in KINDS.items()}))
    return joined_results(measured)


def _texts_apart(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics of runs; a text measured on different tokens has a name for each of them."""
    found: dict[str, dict[str | None, str]] = {}  # segments in words by tokens, by text
    for metrics in measured:
        for text in texts_in(metrics):
            tokens = metrics.get("tokens", {}).get(text)
            found.setdefault(text, {})[tokens] = tokens_in_words(tokens)

    def name(text: str, tokens: str | None) -> str:
        if len(found[text]) == 1:
            return text
        words, all_words = found[text][tokens], [*found[text].values()]
        number = f", set {[*found[text]].index(tokens) + 1}" if all_words.count(words) > 1 else ""
        return f"{text} ({words}{number})"

    def renamed(metrics: Mapping[str, Any], section: str) -> dict[str, dict[str, Any]]:
        tokens, kinds = metrics.get("tokens", {}), metrics.get(section, {}).items()
        return {kind: {name(t, tokens.get(t)): x for t, x in values.items()} for kind, values in kinds}

    return [
        {**metrics, **{section: renamed(metrics, section) for section in OF_TEXTS}} for metrics in measured
    ]


def differences(runs: Sequence[StoredRun]) -> TextTable:
    """Return the settings in which the runs differ, without where they were written to."""
    table = by_key(runs, [run.settings for run in runs])
    places = ("output.folder", "output.name")
    rows = [row for row in table.rows if len(set(row[1:])) > 1 and row[0] not in places]
    return replace(table, rows=rows)


def costs_table(runs: Sequence[StoredRun]) -> TextTable:
    """Return what the runs cost, but for rows that none of them has."""
    table = by_key(runs, [costs_of(run) for run in runs])
    return replace(table, rows=[row for row in table.rows if {*row[1:]} != {ABSENT}], numbers=True)


def costs_of(run: StoredRun) -> dict[str, str]:
    """Return time by phase and memory; each run has all phases, so that their sum comes after them."""
    blocks, tuned = run.journal.blocks.values(), run.journal.tuned
    costs = {"blocks finished": str(len(blocks))}
    phases = dict.fromkeys(PHASES, 0.0)
    for taken in (*(record.seconds for record in blocks), tuned.seconds if tuned else {}):
        for phase, seconds in taken.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    total = sum(phases.values())
    for phase, seconds in phases.items():
        worked = seconds >= SHORTEST
        costs[phase] = f"{duration(seconds)} ({100 * seconds / total:.0f} %)" if worked else ABSENT
    costs["all phases"] = duration(total) if total else ABSENT
    if seconds := run.metrics.get("seconds", {}).get("quantization"):
        costs["quantization, wall clock"] = duration(seconds)
    peaks = [*(record.peak_bytes for record in blocks), run.metrics.get("peak_bytes", {})]
    for place in ("host", "device"):
        if most := max(peak.get(place, 0) for peak in peaks):
            costs[f"{place} memory, peak"] = human(most, "B")
    return costs


def by_key(runs: Sequence[StoredRun], columns: Sequence[Mapping[str, Any]]) -> TextTable:
    """Return a row for each key of any run, a column for each run."""
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = [[key, *(str(column.get(key, ABSENT)) for column in columns)] for key in keys]
    return TextTable(["", *(run.name for run in runs)], rows, numbers=False)
