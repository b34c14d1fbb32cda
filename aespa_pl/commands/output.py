"""Print the results of ``fit`` and ``test``, and keep other libraries' messages off the screen."""

import logging
import threading
import warnings
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from aespa_pl.commands.ending import interrupted_by_closed_pipe
from aespa_pl.evaluation.table import result_table

WIDEST = 10_000
"""Largest width of a table, in columns of a terminal."""


class PipeConsole(Console):
    """Writes to stdout; a reader that has gone stops the run, which can then be continued."""

    def on_broken_pipe(self) -> None:
        """Stop as a signal would, instead of ending without a word.

        Raises:
            RunInterrupted: Always.
        """
        raise interrupted_by_closed_pipe()


def print_results(console: Console, metrics: Mapping[str, Any], method: str) -> None:
    """Print measurements, each model on one line however narrow the terminal is.

    Args:
        console: Console of stdout.
        metrics: Metrics as in ``metrics.json`` or ``test.json``; nothing is printed if nothing was measured.
        method: Name of the quantized model's row.
    """
    results = result_table(metrics, method)
    if not results.rows:
        return
    table = Table()
    for number, head in enumerate(results.head):
        table.add_column(head, justify="right" if number else "left")
    for row in results.rows:
        table.add_row(*row)
    if metrics.get("perplexity"):
        console.print("perplexity (lower is better)", highlight=False, soft_wrap=True)
    print_whole(console, table)


def print_whole(console: Console, table: Table) -> None:
    """Print a table, each row on one line however narrow the terminal is."""
    width = console.width
    console.width = max(
        width, console.measure(table, options=console.options.update(max_width=WIDEST)).maximum
    )
    try:
        console.print(table, crop=False)
    finally:
        console.width = width


def quiet_libraries() -> None:
    """Keep Lightning's messages about each Trainer off the screen: a walk makes one for each block."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric.utilities").setLevel(logging.WARNING)  # of their processes
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # eight lines of retries
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*exists and is not empty.*")  # a continued block
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")  # of tuning
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)


def quiet_writers() -> None:
    """Let a disk that fills under a logger's own thread be reported once, by the thread that works.

    The thread keeps its error and the next write of the logger raises it; Python would print a traceback
    as well.
    """
    before = threading.excepthook

    def report(arguments: threading.ExceptHookArgs) -> None:
        if not issubclass(arguments.exc_type, OSError):
            before(arguments)

    threading.excepthook = report
