"""Draw how good the model is: perplexities, accuracies, and the error of its blocks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from aespa_pl.evaluation.table import KINDS
from aespa_pl.report.maps import NO_BLOCK
from aespa_pl.report.picture import (
    DEPTHS,
    MARKERS,
    SERIES,
    STYLES,
    WIDE,
    Picture,
    depth_axis,
    logarithmic_axis,
    value_axis,
)
from aespa_pl.report.stored import StoredRun

NO_PERPLEXITY = (
    "Not measured by this run. Measure it with aespa-pl test and the run's config.yaml, with at least one "
    "text in data.evaluation.texts."
)
NO_TASK = (
    "Not measured by this run. Measure accuracies with aespa-pl test --tasks '[arc_easy, piqa]'."
)
NO_OUTPUT_ERROR = (
    "Not stored by this run: the journal has no output_error of its blocks, the error of each block's output "
    "against the original model's."
)
VERDICTS = (
    (0.02, "The quantized model is as good as the original to within 2 %"),
    (0.10, "The quantized model is close to the original: it loses up to 10 %"),
    (0.50, "The quantized model is clearly worse than the original: it loses 10 to 50 %"),
    (np.inf, "The quantized model is much worse than the original: it loses more than half"),
)
"""Sentences on the result, each with the largest rise in perplexity that it is said of."""


def verdict(run: StoredRun) -> str:
    """Return whether the result is good, in words that give their limits."""
    texts = list(_texts(run))
    if not texts:
        return NO_PERPLEXITY
    rises = [quantized / original - 1 for _, original, _, quantized in texts]
    worst = int(np.argmax(rises))
    text, original, nearest, quantized = texts[worst]
    sentence = next(words for limit, words in VERDICTS if rises[worst] <= limit)
    rest = (
        f" in perplexity. On {text} it goes from {original:.2f} to {quantized:.2f} "
        f"({100 * rises[worst]:+.0f} %)"
    )
    if nearest is not None and nearest > original:
        avoided = 1 - np.log(quantized / original) / np.log(nearest / original)
        rest += (
            f"; round-to-nearest would give {nearest:.2f}, so {100 * avoided:.0f} % of its loss "
            "(in nats) is avoided"
        )
    return sentence + rest + "."


def _texts(run: StoredRun) -> Iterator[tuple[str, float, float | None, float]]:
    """Yield each text with the perplexities of original, nearest and quantized model."""
    results: Mapping[str, Mapping[str, float]] = run.metrics.get("perplexity", {})
    for text, quantized in results.get("quantized", {}).items():
        if text in results.get("original", {}):
            nearest = results.get("nearest", {}).get(text)
            yield text, results["original"][text], nearest, quantized


def perplexities(runs: Sequence[StoredRun]) -> Picture:
    """Return the perplexities of all runs, a panel for each text."""
    values = {
        text: [
            (run, kind, float(results[text]), 0.0)
            for run, kind, results in _measured(runs, "perplexity")
            if text in results
        ]
        for text in measured_names(runs, "perplexity")
    }
    name, title = "perplexities", "Perplexity"
    if not values:
        return Picture(name, title, NO_PERPLEXITY)
    figure = _dots(values, runs, "perplexity (lower is better)", logarithmic=True)
    captions = [verdict(run) if len(runs) == 1 else f"{run.name}: {verdict(run)}" for run in runs]
    return Picture(name, title, " ".join(captions), figure)


def accuracies(runs: Sequence[StoredRun]) -> Picture:
    """Return the accuracies of all runs with their standard errors, a panel for each task and metric."""
    values = {
        task: [
            (
                run,
                kind,
                100 * float(results[task]["value"]),
                100 * float(results[task]["error"] or 0),
            )
            for run, kind, results in _measured(runs, "tasks")
            if task in results
        ]
        for task in measured_names(runs, "tasks")
    }
    name, title = "accuracies", "Zero-shot tasks"
    if not values:
        return Picture(name, title, NO_TASK)
    figure = _dots(values, runs, "% (higher is better; bars: standard error)", logarithmic=False)
    return Picture(name, title, _accuracy_caption(values), figure)


def _accuracy_caption(values: Mapping[str, Sequence[tuple[StoredRun, str, float, float]]]) -> str:
    """Return the mean change of each run, and how many changes are larger than twice their error."""
    changes: dict[str, list[tuple[float, float]]] = {}
    for rows in values.values():
        originals = {row[0].name: row for row in rows if row[1] == "original"}
        for run, kind, value, error in rows:
            if kind == "quantized" and run.name in originals:
                _, _, before, before_error = originals[run.name]
                change = value - before, float(np.hypot(error, before_error))
                changes.setdefault(run.name, []).append(change)
    if not changes:
        return "The original model was not measured beside it."
    return " ".join(
        f"{name}: {np.mean([change for change, _ in found]):+.1f} percentage points on average over "
        f"{len(found)} tasks; {sum(abs(change) > 2 * error for change, error in found)} of the changes "
        "exceed twice their standard error."
        for name, found in changes.items()
    )


def _measured(
    runs: Sequence[StoredRun], what: str
) -> Iterator[tuple[StoredRun, str, Mapping[str, Any]]]:
    for run in runs:
        results = run.metrics.get(what, {})
        yield from ((run, kind, results[kind]) for kind in KINDS if results.get(kind))


def measured_names(runs: Sequence[StoredRun], what: str) -> list[str]:
    """Return the texts (``perplexity``) or tasks (``tasks``) that any run was measured on."""
    return list(dict.fromkeys(name for *_, results in _measured(runs, what) for name in results))


def _dots(
    values: Mapping[str, Sequence[tuple[StoredRun, str, float, float]]],
    runs: Sequence[StoredRun],
    label: str,
    *,
    logarithmic: bool,
) -> Figure:
    """Return a panel for each text or task: a row for each run and kind, a dot with its number.

    Args:
        values: Run, kind, value and standard error, by text or task.
        runs: All runs.
        label: Label of the values.
        logarithmic: Whether the axis is logarithmic, because ratios matter.
    """
    rows = list(
        dict.fromkeys((run.name, kind) for found in values.values() for run, kind, *_ in found)
    )
    columns = min(3, len(values))
    lines = -(-len(values) // columns)
    height = lines * (0.24 * len(rows) + 0.55) + 0.5
    figure = Figure(figsize=(min(WIDE, 3.4 + 3.0 * columns), height), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for panel, (name, found) in zip(axes.flat, values.items(), strict=False):
        for run, kind, value, error in found:
            number, style = rows.index((run.name, kind)), list(KINDS).index(kind)
            panel.errorbar(
                value,
                number,
                xerr=error or None,
                color=SERIES[style],
                marker=MARKERS[style],
                capsize=2,
            )
            text = f"{value:.4g}" if logarithmic else f"{value:.1f}"
            place: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 7}
            panel.annotate(text, (value, number), (0, 4), **place)
        panel.set(title=name, ylim=(len(rows) - 0.5, -0.9))
        panel.set_yticks(range(len(rows)), [row_name(runs, *row) for row in rows])
        panel.margins(x=0.2)
        if logarithmic and max(row[2] for row in found) > 10 * min(row[2] for row in found):
            logarithmic_axis(panel, panel.xaxis)
    for spare in axes.flat[len(values) :]:
        spare.set_axis_off()
    figure.supxlabel(label, fontsize=9)
    return figure


def row_name(runs: Sequence[StoredRun], name: str, kind: str) -> str:
    """Return the words for a model of a run, where these runs are side by side."""
    return KINDS[kind] if len(runs) == 1 else f"{name}, {KINDS[kind]}"


def output_errors(run: StoredRun, width: float) -> Picture:
    """Return the error of each block's output against the original's, a line for each stage."""
    name, title = "output-error", "Error of each block's output"
    records = {
        index: record["output_error"]
        for index, record in run.blocks.items()
        if record.get("output_error")
    }
    if not run.blocks:
        return Picture(name, title, NO_BLOCK)
    if not records:
        return Picture(name, title, NO_OUTPUT_ERROR)
    stages = list(dict.fromkeys(stage for errors in records.values() for stage in errors))
    figure = Figure(figsize=(width, 3.2), layout="constrained")
    axes = figure.subplots()
    for number, stage in enumerate(stages):
        known = {index: errors[stage] for index, errors in records.items() if stage in errors}
        axes.plot(
            list(known),
            list(known.values()),
            label=stage.replace("_", " "),
            color=SERIES[number % len(SERIES)],
            linestyle=STYLES[number % len(STYLES)],
            marker=MARKERS[number % len(MARKERS)] if len(known) <= 2 * DEPTHS else "",
        )
    axes.set(ylabel="‖output - original‖² / ‖original‖²")
    value_axis(axes)
    depth_axis(axes)
    figure.legend(loc="outside lower center", ncols=4)
    return Picture(name, title, _error_caption(records, stages), figure)


def _error_caption(records: Mapping[int, Mapping[str, float]], stages: Sequence[str]) -> str:
    last = {index: errors[stages[-1]] for index, errors in records.items() if stages[-1] in errors}
    worst = max(last, key=last.__getitem__)
    share = 100 * last[worst]
    digits = f"{share:.0f}" if share >= 10 else f"{share:.2g}"
    caption = f"The error is largest after block {worst}, {digits} % of the output's own size."
    both = [
        errors[stages[-1]] / errors[stages[0]]
        for errors in records.values()
        if errors.get(stages[0]) and stages[-1] in errors
    ]
    if len(stages) > 1 and both:
        before, after = stages[0].replace("_", " "), stages[-1].replace("_", " ")
        caption += (
            f" What is {after} has {np.median(both):.2f} of the error of what is {before} (median)."
        )
    return caption
