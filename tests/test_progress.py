"""Texts reach the terminal as they are: names come from files that others wrote."""

import io

from rich.table import Table

from aespa_pl.commands.output import print_results, print_table
from aespa_pl.progress import PlainConsole
from aespa_pl.report.comparison import Cell, summary


def test_names_neither_style_nor_move_anything() -> None:
    name = "[red]a[/red]:smile:\x1b[2Jb"
    screen = io.StringIO()
    console = PlainConsole(file=screen, width=120, force_terminal=True, color_system=None)
    console.print(f"run {name}")
    table = Table(title=name)
    table.add_column(name)
    table.add_row(name)
    console.print(table)
    print_results(console, {"perplexity": {"quantized": {name: 2.0}}}, name)
    text = screen.getvalue()
    assert "\x1b[2J" not in text
    assert text.count(r"[red]a[/red]:smile:\x1b[2Jb") == 6


def test_tables_fit_into_80_columns_and_leave_the_console_as_wide_as_it_was() -> None:
    texts = {"embedded": 25.0, "wikitext2": 3_983_272.0}
    divergence = {text: {"mean": 0.1, "rare": 0.3, "same_top": 0.9} for text in texts}
    metrics = {
        "perplexity": dict.fromkeys(("original", "nearest", "quantized"), texts),
        "divergence": {"quantized": divergence},
        "size": {"quantized": {"bits_per_weight": 2.12, "bytes": 410_400}},
    }
    screen = io.StringIO()
    console = PlainConsole(file=screen, width=80)
    print_results(console, metrics, "aespa-tuned")
    fitted = {
        "perplexity": {kind: {"embedded": 25.0} for kind in ("original", "nearest", "quantized")},
        "seconds": dict.fromkeys(("statistics", "rounding", "tuning", "quantization"), 9.0),
        "peak_bytes": {"host": 2**31},
    }
    failure = "out of memory " * 20
    methods = ("aespa-hybrid", "aespa-tuned")
    cells = [Cell(method, 2, seed, fitted) for method in methods for seed in (0, 1)]
    print_table(console, summary([*cells, Cell("rtn", 2, 0, failure=failure)]))
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert ["perplexity,", "wikitext2", *["3983272.000"] * 3] in [line.split() for line in lines]
    assert [line.split()[0] for line in lines if "of" in line.split()] == [*methods, "rtn"]
    assert "memory" not in screen.getvalue()
    assert console.width == 80
