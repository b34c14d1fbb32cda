"""Print and store the results of ``fit`` and ``test``, and keep other libraries' messages off the screen."""

import logging
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table

from aespa_pl.errors import UserError
from aespa_pl.evaluation.table import TextTable, known, left_out, result_table, with_others
from aespa_pl.run.schema import Measured
from aespa_pl.storage.files import write_json, write_text

log = logging.getLogger(__name__)

CELL = "AESPA_PL_CELL"
"""Environment variable of a fit that is a cell of ``aespa-pl compare``, which prints the results."""

LEVELS = {  # of other libraries' loggers
    "lightning.pytorch": logging.WARNING,
    "lightning.pytorch.profilers": logging.INFO,  # what the user has asked for
    "lightning.fabric.utilities": logging.WARNING,  # of their processes
    "huggingface_hub": logging.ERROR,  # eight lines of retries
    "transformers.modeling_rope_utils": logging.ERROR,  # of Hunyuan's alpha, which the model does read
}
KERNELS = "transformers.integrations.hub_kernels"  # its advice is of kernels that a CPU doesn't have
MESSAGES = (  # warnings of other libraries that a walk would repeat for each block
    ".*does not have many workers.*",
    ".*exists and is not empty.*",  # of a continued block
    ".*smaller than the logging interval.*",  # of tuning
    ".*LeafSpec.*",
    ".*GPU available but not used.*",  # trainer.accelerator says so
)


def print_results(console: Console, metrics: Mapping[str, Any], method: str) -> None:
    """Print measurements, a line for each measure: all models of one fit into 80 columns."""
    results = result_table(metrics, method)
    if not results.rows:
        return
    if metrics.get("perplexity"):
        console.print("perplexity (lower is better)", soft_wrap=True)
    head, *rows = zip(results.head, *results.rows, strict=True)
    print_table(console, TextTable(head, rows))


def store(folder: Path, metrics: Mapping[str, Any], method: str) -> None:
    """Write ``test.json`` and ``test.md``, with what an earlier test measured and this one did not.

    A read-only folder costs a warning alone, as the results are printed.
    """
    notes: list[str] = []
    earlier = known(Measured, folder / "test.json", notes, "it is written anew")
    for note in notes:
        log.warning("%s", note)
    before = earlier.model_dump(exclude_defaults=True) if earlier else {}
    for words in left_out(metrics, before):
        log.warning("test.json had %s", words)
    everything = with_others(metrics, before)
    try:
        write_json(folder / "test.json", everything)
        write_text(folder / "test.md", result_table(everything, method).markdown())
    except UserError as error:
        log.warning("the results are printed but not stored: %s", error)


def print_table(console: Console, text: TextTable) -> None:
    """Print a table without its details; in a narrow terminal headings are folded, and numbers never are."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for number, (head, *cells) in enumerate(zip(text.head, *text.rows, strict=True)):
        if number in text.details:
            continue
        if number:
            table.add_column(
                head, justify="right", overflow="fold", min_width=max(map(len, cells), default=0)
            )
        else:
            table.add_column(head, overflow="fold")
    for row in text.rows:
        table.add_row(*(cell for number, cell in enumerate(row) if number not in text.details))
    console.print(table, crop=False)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep other libraries' messages about each Trainer and model off the screen in this context."""
    levels = LEVELS if torch.cuda.is_available() else {**LEVELS, KERNELS: logging.ERROR}
    before = {name: logging.getLogger(name).level for name in levels}
    bars, hook = transformers.utils.logging.is_progress_bar_enabled(), threading.excepthook
    with warnings.catch_warnings():
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for message in MESSAGES:
            warnings.filterwarnings("ignore", message=message)
        transformers.utils.logging.disable_progress_bar()
        threading.excepthook = _leave_to_the_logger
        try:
            yield
        finally:
            threading.excepthook = hook
            if bars:
                transformers.utils.logging.enable_progress_bar()
            for name, level in before.items():
                logging.getLogger(name).setLevel(level)


def _leave_to_the_logger(arguments: threading.ExceptHookArgs) -> None:
    """Print no traceback of a disk that fills under a logger's thread: its next write raises the error."""
    if not issubclass(arguments.exc_type, OSError):
        threading.__excepthook__(arguments)
