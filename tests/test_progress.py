"""Texts reach the terminal as they are: names come from files that others wrote."""

import io

from rich.table import Table

from aespa_pl.commands.output import print_results
from aespa_pl.progress import PlainConsole


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
