"""Write the tables of ``docs/results.md`` from the results of ``aespa-pl compare``.

python benchmarks/results.py

``compared/MODEL/NAME.csv`` in this folder is the ``compare.csv`` of one comparison, and
``docs/results.md`` has the commands that make it. A comparison in two runs, which have other bits and seeds,
is ``NAME.csv`` and ``NAME_more.csv``. A table stands between ``<!-- KIND ARGUMENT -->`` and
``<!-- end -->``, and all other text of the page stays.
"""

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev

from jsonargparse import auto_cli

from aespa_pl.evaluation.table import TextTable
from aespa_pl.methods import METHODS

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "results.md"
COMPARED = HERE / "compared"
PAPER = HERE / "paper_opt125m.csv"
"""Perplexities of OPT-125M on WikiText-2 as the paper prints them: three of its tables, by bit width."""
EARLIER = HERE / "earlier.csv"
"""Perplexities of an earlier version with three seeds, a line for each model, bit width and method."""
MODELS = ("opt", "llama", "bloom", "babyllama105", "tiny-llama", "tiny-opt")
"""Possible folders of ``compared/``, in the order of columns."""
REFERENCES = ("original", "nearest")
UNKNOWN = "."
PLACE = re.compile(r"(<!-- (\w+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
ABLATIONS = {
    "strategy": {
        "layers, on their own output": ("methods", "adaround"),
        "attention as a whole, on its output": ("methods", "brecq"),
        "layers, on the attention's output": ("strategy", "adaround"),
    },
    "hessian": {"H": ("methods", "zfold"), "H_V": ("hessian", "zfold")},
}
"""Rows of each ablation: a comparison's NAME and a method in it."""

Row = dict[str, str]


def main() -> None:
    """Write the tables of the page anew."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def filled(page: str) -> str:
    """Return the page with its tables made from the stored files."""
    tables = {
        "model": model_table,
        "orders": orders_table,
        "ablation": ablation_table,
        "earlier": earlier_table,
    }

    def table(place: re.Match[str]) -> str:
        return place[1] + tables[place[2]](place[3]).markdown() + place[4]

    return PLACE.sub(table, page)


def model_table(model: str) -> TextTable:
    """Return all methods on one model, a part for each bit width."""
    rows = read(model, "methods")
    lines = []
    for bits in sorted({row["bits"] for row in rows}):
        same_bits = [row for row in rows if row["bits"] == bits]
        lines += [
            [kind, bits, shown(column(same_bits, kind)[:1]), "", "", ""] for kind in REFERENCES
        ]
        measured = ((m, [row for row in same_bits if row["method"] == m]) for m in METHODS)
        lines += [method_line(method, bits, runs) for method, runs in measured if runs]
    head = ["method", "bits", "perplexity", "loss / nearest", "processor s", "seeds"]
    return TextTable(head, lines)


def method_line(method: str, bits: str, runs: Sequence[Row]) -> list[str]:
    """Return means over the seeds, the perplexity's spread, and the reason where a run failed."""
    perplexity = shown(column(runs, "perplexity"), spread=True)
    failed = [row["state"] for row in runs if row["state"] != "finished"]
    return [
        f"`{method}`",
        bits,
        "; ".join([perplexity, *failed]),
        shown(column(runs, "loss / nearest")),
        shown(column(runs, "seconds processor"), digits=0),
        " ".join(row["seed"] for row in runs),
    ]


def orders_table(bits: str) -> TextTable:
    """Return each method's perplexity on each model, with its spread over the seeds, beside the paper's."""
    runs = {model: of_bits(model, "methods", bits) for model in MODELS}
    runs = {model: rows for model, rows in runs.items() if rows}
    paper = published("main", bits)
    lines = [
        [kind, *(shown(column(rows, kind)[:1]) for rows in runs.values()), paper.get(kind, "")]
        for kind in REFERENCES
    ]
    for method in METHODS:
        measured = [
            shown(
                column((row for row in rows if row["method"] == method), "perplexity"), spread=True
            )
            for rows in runs.values()
        ]
        lines.append([f"`{method}`", *measured, paper.get(method, UNKNOWN)])
    return TextTable(["method", *runs, "OPT-125M in the paper"], lines)


def ablation_table(name: str) -> TextTable:
    """Return the rows of an ablation at INT2, with the seeds that all rows of a model have."""
    rows = ABLATIONS[name]
    own = {name for name, _ in rows.values()} - {"methods"}
    models = [model for model in MODELS if any(read(model, comparison) for comparison in own)]
    paper = published(name, "2")
    cells: dict[str, list[str]] = {label: [] for label in rows}
    for model in models:
        runs = {
            label: [row for row in of_bits(model, comparison, "2") if row["method"] == method]
            for label, (comparison, method) in rows.items()
        }
        seeds = set.intersection(*({row["seed"] for row in found} for found in runs.values()))
        for label, found in runs.items():
            same_seeds = [row for row in found if row["seed"] in seeds]
            cells[label].append(shown(column(same_seeds, "perplexity"), spread=True))
    lines = [[label, *cells[label], paper[label]] for label in rows]
    return TextTable([name, *models, "OPT-125M in the paper"], lines)


def earlier_table(bits: str) -> TextTable:
    """Return mean and spread over three seeds of an earlier version, a row for each model."""
    with EARLIER.open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["bits"] == bits]
    methods = [method for method in METHODS if any(row["method"] == method for row in rows)]
    table = []
    for model in dict.fromkeys(row["model"] for row in rows):
        same_model = {row["method"]: row for row in rows if row["model"] == model}
        references = (shown(column(same_model.values(), kind)[:1]) for kind in REFERENCES)
        seeds = ([float(same_model[m][f"seed {n}"]) for n in range(3)] for m in methods)
        table.append([model, *references, *(shown(values, spread=True) for values in seeds)])
    return TextTable(["model", *REFERENCES, *methods], table)


def read(model: str, comparison: str) -> list[Row]:
    """Return the runs of a comparison that were begun; none where it was not made."""
    rows: list[Row] = []
    for name in (comparison, f"{comparison}_more"):
        file = COMPARED / model / f"{name}.csv"
        if file.is_file():
            with file.open(encoding="utf-8", newline="") as lines:
                rows += [row for row in csv.DictReader(lines) if row["state"] != "not run"]
    return rows


def of_bits(model: str, comparison: str, bits: str) -> list[Row]:
    """Return the runs of one bit width."""
    return [row for row in read(model, comparison) if row["bits"] == bits]


def published(table: str, bits: str) -> dict[str, str]:
    """Return the figures of one of the paper's tables, by the names of its rows."""
    with PAPER.open(encoding="utf-8", newline="") as lines:
        return {row["method"]: row[bits] for row in csv.DictReader(lines) if row["table"] == table}


def column(runs: Iterable[Row], name: str) -> list[float]:
    """Return the numbers of a column, whose head may end with the name of the comparison's only text."""
    values = []
    for row in runs:
        heads = [head for head in row if head == name or head.startswith(f"{name} ")]
        if len(heads) > 1:
            raise ValueError(f"one text was expected, found {', '.join(heads)}")
        values += [float(row[head]) for head in heads if row[head]]
    return values


def shown(values: Sequence[float], *, digits: int = 3, spread: bool = False) -> str:
    """Return the mean of the values, with their standard deviation if there are several."""
    if not values:
        return UNKNOWN
    deviation = f" ± {stdev(values):.{digits}f}" if spread and len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{deviation}"


if __name__ == "__main__":
    auto_cli(main)
