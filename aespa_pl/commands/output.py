"""Print and store the results of ``fit`` and ``test``, and keep other libraries' messages off the screen."""

import logging
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console
from rich.table import Table

from aespa_pl.errors import UserError
from aespa_pl.evaluation.table import TextTable, result_table
from aespa_pl.progress import PlainConsole
from aespa_pl.run.interruption import interrupted_by_closed_pipe
from aespa_pl.storage.files import write_json, write_text

log = logging.getLogger(__name__)

WIDEST = 10_000
"""Largest width of a table, in columns of a terminal."""
LEVELS = {
    "lightning.pytorch": logging.WARNING,
    "lightning.pytorch.profilers": logging.INFO,  # what the user has asked for
    "lightning.fabric.utilities": logging.WARNING,  # of their processes
    "huggingface_hub": logging.ERROR,  # eight lines of retries
}
"""Levels of other libraries' loggers."""


class PipeConsole(PlainConsole):
    """Writes to stdout; a reader that has gone stops the run, which can then be continued."""

    def on_broken_pipe(self) -> None:
        """Stop as a signal would, instead of ending without a word. Always raises RunInterrupted."""
        raise interrupted_by_closed_pipe()


def print_results(console: Console, metrics: Mapping[str, Any], method: str) -> None:
    """Print measurements, each model on one line however narrow the terminal is."""
    results = result_table(metrics, method)
    if not results.rows:
        return
    if metrics.get("perplexity"):
        console.print("perplexity (lower is better)", soft_wrap=True)
    print_table(console, results)


def store(folder: Path, metrics: Mapping[str, Any], method: str) -> None:
    """Write ``test.json``, and the same as a table, ``test.md``.

    A folder that is read-only costs a warning alone: the table is printed too, and measuring may have taken
    hours.
    """
    try:
        write_json(folder / "test.json", metrics)
        write_text(folder / "test.md", result_table(metrics, method).markdown())
    except UserError as error:
        log.warning("the results are printed but not stored: %s", error)


def print_table(console: Console, text: TextTable) -> None:
    """Print a table, each row on one line however narrow the terminal is."""
    table, width = Table(), console.width
    for number, head in enumerate(text.head):
        table.add_column(head, justify="right" if number else "left")
    for row in text.rows:
        table.add_row(*row)
    console.width = max(
        width, console.measure(table, options=console.options.update(max_width=WIDEST)).maximum
    )
    try:
        console.print(table, crop=False)
    finally:
        console.width = width


@contextmanager
def quiet() -> Iterator[None]:
    """Keep other libraries' messages off the screen in this context."""
    loggers = [logging.getLogger(name) for name in LEVELS]
    before, hook = [logger.level for logger in loggers], threading.excepthook
    bars = transformers.utils.logging.is_progress_bar_enabled()
    with warnings.catch_warnings():
        quiet_libraries()
        quiet_writers()
        transformers.utils.logging.disable_progress_bar()
        try:
            yield
        finally:
            if bars:
                transformers.utils.logging.enable_progress_bar()
            threading.excepthook = hook
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)


def quiet_libraries() -> None:
    """Keep Lightning's messages about each Trainer off the screen: a walk makes one for each block."""
    for name, level in LEVELS.items():
        logging.getLogger(name).setLevel(level)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*exists and is not empty.*")  # a continued block
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")  # of tuning
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)


def quiet_writers() -> None:
    """Let a disk that fills under a logger's own thread be reported once, by the thread that works.

    The next write of the logger raises the thread's error, of which Python would print a traceback as well.
    """
    before = threading.excepthook

    def report(arguments: threading.ExceptHookArgs) -> None:
        if not issubclass(arguments.exc_type, OSError):
            before(arguments)

    threading.excepthook = report
