"""Read what a run and ``aespa-pl test`` measured, and make one table for terminal, Markdown and report."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aespa_pl.errors import printable
from aespa_pl.measure import human
from aespa_pl.run.schema import Content, DamagedFileError, Measured, parse
from aespa_pl.settings import TaskSettings

KINDS = {"original": "original", "nearest": "round-to-nearest", "quantized": "quantized"}
"""Models in the order of the rows, and their names in tables."""
ABSENT = "-"
SPECIAL = re.compile(r"[\\`*|\[\]~]")
"""Characters with a meaning in Markdown, beside those of HTML."""
GB = 10**9
OF_TEXTS = {"perplexity": "perplexity", "divergence": "KL divergence", "tasks": "accuracy"}
"""Sections of the metrics that are of texts and tasks, and their names in sentences."""
SECTIONS = ("perplexity", "divergence", "tasks", "size", "test_seconds")
"""Sections of the metrics that have columns, in their order."""


@dataclass(frozen=True)
class TextTable:
    """Holds rows of text."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: bool = True
    """Whether all columns but the first hold numbers."""
    details: Collection[int] = ()
    """Numbers of the columns that files have and a terminal, which is narrow, leaves out."""

    def markdown(self) -> str:
        """Return the table in Markdown."""
        names, *rows = ([markdown(cell) for cell in line] for line in (self.head, *self.rows))
        lines = [names, ["---", *("---:" for _ in self.head[1:])], *rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def markdown(text: str) -> str:
    """Return a text that Markdown shows as it is: no HTML, no link, no new column, no control character."""
    return SPECIAL.sub(r"\\\g<0>", printable(text)).replace("&", "&amp;").replace("<", "&lt;")


def result_table(metrics: Mapping[str, Any], method: str = KINDS["quantized"]) -> TextTable:
    """Return a table of metrics, a row for each model; columns without any value are left out.

    The metrics are those of ``test.json``; all of it may be missing: ``perplexity`` by kind and text,
    ``divergence`` by kind and text (``mean``, ``rare``, ``same_top``), ``tasks`` by kind and task (``value``,
    ``error``), ``size`` by kind (``bits_per_weight``, ``bytes``) and ``test_seconds`` by kind. ``method`` is
    the name of the quantized model's row.
    """
    return joined_results([(metrics, {**KINDS, "quantized": method})])


def joined_results(measured: Sequence[tuple[Mapping[str, Any], Mapping[str, str]]]) -> TextTable:
    """Return one table of the metrics of several runs; each comes with the names of its rows by kind."""
    columns: dict[str, dict[tuple[int, str], str]] = {}
    for section in SECTIONS:
        for number, (metrics, _) in enumerate(measured):
            for kind, values in metrics.get(section, {}).items():
                for head, text in _cells(section, values):
                    columns.setdefault(head, {})[number, kind] = text
    rows = [
        [names[kind], *(column.get((number, kind), ABSENT) for column in columns.values())]
        for number, (_, names) in enumerate(measured)
        for kind in KINDS
        if any((number, kind) in column for column in columns.values())
    ]
    return TextTable(["", *columns], rows)


def _cells(section: str, values: Any) -> Iterator[tuple[str, str]]:
    """Yield the columns of one section of one model's metrics, and what stands there."""
    if section == "perplexity":
        yield from ((f"perplexity, {text}", f"{value:.3f}") for text, value in values.items())
    elif section == "divergence":
        for text, value in values.items():
            yield f"KL, {text}", f"{value['mean']:.4f}"
            yield f"KL 99.9 %, {text}", f"{value['rare']:.3f}"
            yield f"same top token, {text}, %", f"{100 * value['same_top']:.1f}"
    elif section == "tasks":
        for task, score in values.items():  # accuracy and standard error
            error = "" if score.get("error") is None else f" ± {100 * score['error']:.1f}"
            yield f"{task}, %", f"{100 * score['value']:.1f}{error}"
    elif section == "size":
        if "bits_per_weight" in values:
            yield "bits per quantized weight", f"{values['bits_per_weight']:.2f}"
        yield "size", human(values["bytes"], "B")
    else:
        yield "seconds", f"{values:.0f}"


def measured(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return what ``fit`` measured, with what a later ``test`` adds; and sentences on damaged files."""
    contents, notes = list[dict[str, Any]](), list[str]()
    for name in ("metrics.json", "test.json"):
        content = known(Measured, folder / name, notes, "measure again with aespa-pl test") or Measured()
        contents.append({k: v for k, v in content.model_dump(exclude_none=True).items() if v})
    return with_others(*contents), notes


def known(kind: type[Content], path: Path, notes: list[str], consequence: str) -> Content | None:
    """Return a file of a run, None without it; one that is damaged becomes a note with its consequence."""
    try:
        return parse(kind, path) if path.exists() else None
    except (OSError, DamagedFileError) as error:
        notes.append(f"{path.name} is damaged ({error}): {consequence}")
        return None


def with_others(metrics: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics, with those of ``others`` that they lack and that may stand beside them in a table.

    A text that both have measured is added to only where both name the same ``tokens``, or the metrics, of an
    older version, none: a row of other segments beside the original's would be a wrong comparison. Either may
    be empty.
    """
    own, other = metrics.get("tokens", {}), others.get("tokens", {})
    differ = _differing(metrics, others)
    joined = {**others, **metrics}
    if own or other:
        joined["tokens"] = {**other, **own}
    for section in (*OF_TEXTS, "size"):
        left_out = differ if section in OF_TEXTS else set()
        kinds = {}
        for kind in KINDS:
            first, more = (found.get(section, {}).get(kind, {}) for found in (metrics, others))
            kinds[kind] = {**first, **{k: v for k, v in more.items() if k not in {*first, *left_out}}}
        if kinds := {kind: values for kind, values in kinds.items() if values}:
            joined[section] = kinds
        else:
            joined.pop(section, None)
    return joined


def _differing(metrics: Mapping[str, Any], others: Mapping[str, Any]) -> set[str]:
    """Return the texts of ``metrics`` that ``others`` have, or may have, measured on other tokens."""
    own, other = metrics.get("tokens", {}), others.get("tokens", {})
    return {text for text in texts_in(metrics) if other.get(text) != own.get(text, other.get(text))}


def texts_in(metrics: Mapping[str, Any]) -> set[str]:
    """Return the texts that have a perplexity or a divergence."""
    return {text for name in OF_TEXTS for values in metrics.get(name, {}).values() for text in values}


def left_out(metrics: Mapping[str, Any], others: Mapping[str, Any]) -> Iterator[str]:
    """Yield words on each text that ``with_others`` leaves out of ``others``, and on what that loses."""
    for text in sorted(_differing(metrics, others)):
        kinds = {name: others.get(section, {}).values() for section, name in OF_TEXTS.items()}
        if lost := [name for name, values in kinds.items() if any(text in each for each in values)]:
            where = tokens_in_words(others.get("tokens", {}).get(text))
            what = "by other rules" if lost == [OF_TEXTS["tasks"]] else "on other tokens"
            yield f"{printable(text)} {what} ({where}): no {' or '.join(lost)} of these is kept"


def tokens_in_words(tokens: str | None) -> str:
    """Return what a text or task was measured on, from what ``tokens`` of the metrics say of it."""
    shape = re.match(r"\((\d+), (\d+)\)", tokens or "")
    return f"{shape[1]} segments of {shape[2]} tokens" if shape else tokens or "of an older version"


def rules_of(scores: Mapping[str, Mapping[str, Any]], settings: TaskSettings) -> dict[str, str]:
    """Return what ``tokens`` of the metrics say of tasks, which tells other items and examples apart."""
    examples = f"{settings.task_examples} examples, seed {settings.task_seed}"
    return {name: f"{score['items']} items, {examples}" for name, score in scores.items()}
