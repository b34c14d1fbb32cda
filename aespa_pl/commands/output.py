"""What ``fit`` and ``test`` print, and what they keep off the screen."""

import logging
import threading
import warnings
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from aespa_pl.commands.ending import interrupted_by_closed_pipe

WIDEST = 10_000
"""Columns of a terminal that a table of perplexities takes at most."""
LABELS = {"original": "original", "nearest": "round-to-nearest"}
"""Names of the rows of the table; that of the quantized model is its method's."""


class PipeConsole(Console):
    """Writes to stdout; a reader that has gone stops the run, which can then be continued."""

    def on_broken_pipe(self) -> None:
        """Stop as a signal would, instead of ending without a word.

        Raises:
            RunInterrupted: Always.
        """
        raise interrupted_by_closed_pipe()


def print_perplexities(
    console: Console, results: Mapping[str, Mapping[str, float]], fingerprint: Mapping[str, Any]
) -> None:
    """Print a table of perplexities.

    Args:
        console: Where to.
        results: Perplexity by kind of model and text; nothing is printed if there are none.
        fingerprint: Of the run, which knows the method.
    """
    if not results:
        return
    texts = next(iter(results.values()))
    table = Table()
    table.add_column("")
    for text in texts:
        table.add_column(text, justify="right")
    labels = LABELS | {"quantized": str(fingerprint["quantization"]["method"])}
    for kind, values in results.items():
        table.add_row(labels[kind], *(f"{values[text]:.3f}" for text in texts))
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
    """Keep what Lightning says about every Trainer off the screen: a walk makes one a block."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric.utilities").setLevel(logging.WARNING)  # of their processes
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # eight lines of retries
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*exists and is not empty.*")  # a continued block
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
