"""Make one table of all measurements, for the terminal, for Markdown and for the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = {"original": "original", "nearest": "round-to-nearest", "quantized": "quantized"}
"""Models in the order of the rows, and their names in tables."""
ABSENT = "-"
GB = 10**9


@dataclass(frozen=True)
class ResultTable:
    """Holds rows of text; all columns but the first are numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Return the table in Markdown."""
        lines = [self.head, ["---", *("---:" for _ in self.head[1:])], *self.rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def result_table(metrics: Mapping[str, Any], method: str = KINDS["quantized"]) -> ResultTable:
    """Return a table of metrics, a row for each model; columns without any value are left out.

    Args:
        metrics: Metrics as in ``test.json``; all of it may be missing: ``perplexity`` by kind and text,
            ``tasks`` by kind and task (``value``, ``error``), ``size`` by kind (``bits_per_weight``,
            ``bytes``) and ``test_seconds`` by kind.
        method: Name of the quantized model's row.
    """
    columns: dict[str, dict[str, str]] = {}
    for kind, texts in metrics.get("perplexity", {}).items():
        for text, value in texts.items():
            columns.setdefault(f"perplexity, {text}", {})[kind] = f"{value:.3f}"
    for kind, tasks in metrics.get("tasks", {}).items():
        for task, score in tasks.items():
            columns.setdefault(f"{task}, %", {})[kind] = accuracy(score)
    for kind, size in metrics.get("size", {}).items():
        if "bits_per_weight" in size:
            columns.setdefault("bits per weight", {})[kind] = f"{size['bits_per_weight']:.2f}"
        columns.setdefault("GB", {})[kind] = f"{size['bytes'] / GB:.3g}"
    for kind, seconds in metrics.get("test_seconds", {}).items():
        columns.setdefault("seconds", {})[kind] = f"{seconds:.0f}"
    measured = [kind for kind in KINDS if any(kind in column for column in columns.values())]
    names = {**KINDS, "quantized": method}
    rows = [
        [names[kind], *(column.get(kind, ABSENT) for column in columns.values())]
        for kind in measured
    ]
    return ResultTable(["", *columns], rows)


def accuracy(score: Mapping[str, Any]) -> str:
    """Return an accuracy and its standard error in per cent."""
    error = score.get("error")
    return f"{100 * score['value']:.1f}" + (f" ± {100 * error:.1f}" if error is not None else "")
