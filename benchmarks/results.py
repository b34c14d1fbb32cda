"""Write the tables of README and of docs/{results,uniform,toys}.md, and the pictures of sizes, from files.

python benchmarks/results.py

``compared/MODEL/NAME.csv`` in this folder is the ``compare.csv`` of one comparison, and the pages have the
commands that make it; of one in two runs there is ``NAME_more.csv`` as well. ``files.csv`` is what
``peer_llama_cpp.py`` measures. Tables are between ``<!-- KIND ARGUMENT -->`` and ``<!-- end -->``.
"""

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev

from jsonargparse import auto_cli
from matplotlib.figure import Figure

from aespa_pl.evaluation.table import TextTable
from aespa_pl.methods import METHODS
from aespa_pl.report.picture import HALF, MARKERS, SERIES, saved, style

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
PAGES = (DOCS / "results.md", DOCS / "uniform.md", DOCS / "toys.md", HERE.parent / "README.md")
PICTURES = DOCS / "pictures"
COMPARED = HERE / "compared"
PAPER = HERE / "paper_opt125m.csv"
"""Perplexities of OPT-125M on WikiText-2 as the paper prints them: three of its tables, by bit width."""
AUTHORS_TOKENS = HERE / "authors_tokens.csv"
"""Perplexities that ``accuracy.py`` measures on the tokens of the authors' runs."""
MODELS = ("opt", "llama", "bloom")
"""Possible folders of ``compared/``, in the order of columns."""
REFERENCES = ("original", "nearest")
UNKNOWN = "."
PLACE = re.compile(r"(<!-- (\w+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
PEER = "llama.cpp, imatrix"
"""Who made the files that ours are beside."""
OURS = "aespa-fast"
FILE_COLUMNS = {"perplexity": 3, "kl": 4, "kl 99.9 %": 3, "same top": 3}
"""Measures of files, with the digits that are shown."""
ABLATIONS = {
    "strategy": {
        "layers, on their own output": ("methods", "adaround"),
        "layers, on the attention's output": ("strategy", "adaround"),
    },
    "hessian": {"H": ("methods", "zfold"), "H_V": ("hessian", "zfold")},
}
"""Rows of each ablation: a comparison's NAME and a method in it."""

Row = dict[str, str]


def main() -> None:
    """Write the tables of the pages and the pictures anew."""
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    for file in COMPARED.glob("*/files.csv"):
        picture = sizes_picture(file.parent.name)
        (PICTURES / f"sizes-{file.parent.name}.png").write_bytes(saved(picture, "png"))


def filled(page: str) -> str:
    """Return the page with its tables made from the stored files."""
    tables = {
        "model": model_table,
        "groups": groups_table,
        "orders": orders_table,
        "ablation": ablation_table,
        "authors": authors_table,
        "files": files_table,
        "sizes": sizes_table,
    }

    def table(place: re.Match[str]) -> str:
        return place[1] + tables[place[2]](place[3]).markdown() + place[4]

    return PLACE.sub(table, page)


def model_table(model: str) -> TextTable:
    """Return all methods on one model, a part for each bit width."""
    return methods_table(read(model, "methods"))


def groups_table(model: str) -> TextTable:
    """Return what methods reach where groups of weights have scales of their own."""
    return methods_table(read(model, "groups"))


def methods_table(rows: list[Row]) -> TextTable:
    """Return all methods of a comparison, a part for each bit width, with columns for each text."""
    texts = texts_of(rows)
    lines = []
    for bits in sorted({row["bits"] for row in rows}):
        same_bits = [row for row in rows if row["bits"] == bits]
        for kind in REFERENCES:
            values = (shown(column(same_bits, kind, text)[:1]) for text in texts)
            lines.append([kind, bits, *(cell for value in values for cell in (value, "")), "", ""])
        measured = ((m, [row for row in same_bits if row["method"] == m]) for m in METHODS)
        lines += [method_line(method, bits, runs, texts) for method, runs in measured if runs]
    of = [f", {text}" for text in texts] if len(texts) > 1 else [""]
    heads = [head + text for text in of for head in ("perplexity", "loss / nearest")]
    return TextTable(["method", "bits", *heads, "processor s", "seeds"], lines)


def method_line(method: str, bits: str, runs: Sequence[Row], texts: Sequence[str]) -> list[str]:
    """Return means over the seeds, the perplexity's spread, and the reason where a run failed."""
    failed = [row["state"] for row in runs if row["state"] != "finished"]
    cells = []
    for text in texts:
        perplexity = shown(column(runs, "perplexity", text), spread=True)
        cells += ["; ".join([perplexity, *failed]), shown(column(runs, "loss / nearest", text))]
    seconds = shown(column(runs, "seconds processor"), digits=0)
    return [method, bits, *cells, seconds, " ".join(row["seed"] for row in runs)]


def texts_of(rows: Sequence[Row]) -> list[str]:
    """Return the names of the evaluation texts, in the order of a comparison's columns."""
    prefix = "perplexity "
    return list(dict.fromkeys(h.removeprefix(prefix) for row in rows for h in row if prefix in h))


def orders_table(bits: str) -> TextTable:
    """Return perplexities of the methods that were run, with their spread over seeds, beside the paper's."""
    runs = {model: of_bits(model, "methods", bits) for model in MODELS}
    runs = {model: rows for model, rows in runs.items() if rows}
    paper = published("main", bits)
    lines = [
        [kind, *(shown(column(rows, kind)[:1]) for rows in runs.values()), paper.get(kind, "")]
        for kind in REFERENCES
    ]
    for method in METHODS:
        measured = [
            shown(column((row for row in rows if row["method"] == method), "perplexity"), spread=True)
            for rows in runs.values()
        ]
        if set(measured) != {UNKNOWN}:
            lines.append([method, *measured, paper.get(method, UNKNOWN)])
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


def authors_table(widths: str) -> TextTable:
    """Return mean and spread over three seeds on the tokens of the authors' runs, for widths such as 2,3."""
    with AUTHORS_TOKENS.open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["bits"] in widths.split(",")]
    methods = [method for method in METHODS if any(row["method"] == method for row in rows)]
    table = []
    for bits, model in sorted({(row["bits"], row["model"]) for row in rows}):
        runs = {row["method"]: row for row in rows if (row["bits"], row["model"]) == (bits, model)}
        references = (shown(column(runs.values(), kind)[:1]) for kind in REFERENCES)
        seeds = ([float(runs[method][f"seed {n}"]) for n in range(3)] for method in methods)
        table.append([model, bits, *references, *(shown(values, spread=True) for values in seeds)])
    return TextTable(["model", "bits", *REFERENCES, *methods], table)


def files_table(model: str) -> TextTable:
    """Return what was measured of each file of a model, with columns for each text, by size."""
    files = files_of(model)
    first = next(iter(files.values()))
    texts = list(first)
    heads = [f"{text}: {name}" for text in texts for name in FILE_COLUMNS]
    originals = [cell for text in texts for cell in (shown([float(first[text]["original"])]), "", "", "")]
    lines = [["original", "", "", *originals]]
    for (who, name), rows in files.items():
        of_texts = [
            f"{float(rows[text][key]):.{digits}f}" for text in texts for key, digits in FILE_COLUMNS.items()
        ]
        row = rows[texts[0]]
        lines.append([f"{who}: {name}", f"{int(row['bytes']):,}", row["version"], *of_texts])
    return TextTable(["file", "bytes", "version", *heads], lines)


def sizes_table(model: str) -> TextTable:
    """Return llama.cpp's files beside ours of the same mixture and of the same size, on the first text."""
    files = files_of(model)
    text = next(iter(next(iter(files.values()))))
    lines = []
    for name in (name for who, name in files if who == PEER):
        theirs = files[PEER, name][text]
        size = float(theirs["bytes"]) / 1e6
        cells = [f"{name}, {size:.1f} MB"]
        for row in (
            theirs,
            *(files.get(key, {}).get(text) for key in ((OURS, name), (f"{OURS}, target", f"{size:.1f} MB"))),
        ):
            cells += [
                UNKNOWN if row is None else f"{float(row[key]):.{digits}f}"
                for key, digits in (("perplexity", 2), ("kl", 3))
            ]
        lines.append(cells)
    of = ("llama.cpp, imatrix", "ours, the same name", "ours, types chosen for the size")
    return TextTable(["file", *(f"{who}: {what}" for who in of for what in ("perplexity", "KL"))], lines)


def sizes_picture(model: str) -> Figure:
    """Return size against divergence on the first text, a point for each file but those of aespa-tuned."""
    files = files_of(model)
    text = next(iter(next(iter(files.values()))))
    with style():
        figure = Figure(figsize=(HALF * 1.4, 3.6), layout="constrained")
        axes = figure.subplots()
        # the points of aespa-tuned would hide those of aespa-fast
        shown = dict.fromkeys(who for who, _ in files if "tuned" not in who)
        for number, who in enumerate(shown):
            rows = {name: of[text] for (by, name), of in files.items() if by == who}
            points = [(float(row["bytes"]) / 1e6, float(row["kl"])) for row in rows.values()]
            axes.plot(*zip(*points, strict=True), MARKERS[number], color=SERIES[number], label=who)
            for name, point in zip(rows, points, strict=True):
                axes.annotate(name, point, (5, 3), textcoords="offset points", fontsize=7)
        axes.set(yscale="log", xlabel="file, MB", ylabel=f"KL divergence on {text}, nats per token")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.legend()
    return figure


def files_of(model: str) -> dict[tuple[str, str], dict[str, Row]]:
    """Return the rows of each file by text; files by who made them and by name, the smallest first."""
    with (COMPARED / model / "files.csv").open(encoding="utf-8", newline="") as lines:
        rows = sorted(csv.DictReader(lines), key=lambda row: int(row["bytes"]))
    files: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        files.setdefault((row["who"], row["file"]), {})[row["text"]] = row
    return files


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


def column(runs: Iterable[Row], name: str, text: str | None = None) -> list[float]:
    """Return the numbers of a column, whose head may end with the name of a text.

    Args:
        runs: Rows of a comparison.
        name: Head of the column, without a text.
        text: Name of the text; None where there is only one.

    Raises:
        ValueError: There are several texts, and none was named.
    """
    values = []
    for row in runs:
        of_texts = [head for head in row if head.startswith(f"{name} ")]
        heads = [name] if name in row else of_texts if text is None else [f"{name} {text}"]
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
