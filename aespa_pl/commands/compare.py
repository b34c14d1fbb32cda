"""Run ``aespa-pl compare``: methods, bit widths and seeds side by side, each an ordinary ``fit``."""

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

import aespa_pl
from aespa_pl.commands.arguments import Arguments, Option, read_configuration
from aespa_pl.commands.compare_section import (
    SECTION,
    CompareSettings,
    compare_parser,
    split_options,
)
from aespa_pl.commands.mistakes import refuse_other_methods
from aespa_pl.commands.output import PipeConsole, print_table
from aespa_pl.errors import EndedError, UserError
from aespa_pl.report.comparison import Cell, cells_csv, figure, summary
from aespa_pl.run.find import last_run
from aespa_pl.run.interruption import Interruption, RunInterrupted
from aespa_pl.run.journal import Run
from aespa_pl.settings import OutputSettings
from aespa_pl.storage.files import disk_errors, write_json, write_text, write_whole

CELLS_FAILED = 1
"""Status where some cells have no result."""
VERSION = "version of aespa-pl"
POLL_SECONDS = 0.2
"""Seconds after which a signal is passed on to the run under way."""


RunCell = Callable[[Sequence[str]], str]
"""Runs ``fit`` with these words; returns why it failed, the empty text where it did not."""


def run(words: Sequence[str], interruption: Interruption) -> None:
    """Run all cells that are not finished, and write the results; the same command goes on after a signal."""
    given = Arguments.read(words[1:])
    if given.wants_help:
        compare_parser().print_help()
        sys.exit()
    settings, rest = split_options(given)
    refuse_other_methods(rest, settings.methods)
    interruption.how_to_continue = shlex.join(["aespa-pl", *words])
    console = PipeConsole()
    folder = compare(settings, rest, in_processes(interruption), console)
    console.print(str(folder), soft_wrap=True)


def compare(settings: CompareSettings, given: Arguments, run_cell: RunCell, console: Console) -> Path:
    """Run the cells and write their results; return the folder. Raises EndedError where some fail."""
    defaults = OutputSettings()
    folder = Path(
        given.setting("output.folder", defaults.folder), given.setting("output.name", SECTION)
    ).expanduser()
    _refuse_other(folder, given)
    # all of them first: a process that is killed early leaves a table with every finished cell
    cells = [_finished(folder, cell) for cell in settings.cells()]
    for number, cell in enumerate(cells):
        if cell.metrics is None:
            console.print(f"cell {number + 1} of {len(cells)}: {cell.name}", soft_wrap=True)
            failure = run_cell(_words(given, folder, cell))
            cells[number] = replace(_finished(folder, cell), failure=failure)
            if failure:
                console.print(f"{cell.name}: {failure}", soft_wrap=True)
        _write(folder, cells)
    print_table(console, summary(cells))
    _draw(folder, cells, console)
    if failed := [cell.name for cell in cells if cell.metrics is None]:
        raise EndedError(
            f"{len(failed)} of {len(cells)} cells have failed ({', '.join(failed)}), and "
            f"{folder / 'compare.md'} says why; the others are kept",
            CELLS_FAILED,
        )
    return folder


def in_processes(interruption: Interruption) -> RunCell:
    """Return a function that runs a cell in a process of its own, so that its end spares the others."""

    def run_cell(words: Sequence[str]) -> str:
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            interruption.defer(active=True)
            # a process group of its own: a Ctrl-C reaches it once, from us
            process = subprocess.Popen(  # noqa: S603 - our own program
                # -P: a file of the current folder, such as yaml.py, stands for no library
                [sys.executable, "-P", "-m", "aespa_pl", "fit", *words],
                stderr=errors,
                process_group=0,
            )
            status = _wait(process, interruption)
            interruption.defer(active=False)
            errors.seek(0)
            said = errors.read()
        interruption.check()  # first: how the cell is continued would stand beside how all are
        sys.stderr.write(said)
        return failure(status, said)

    return run_cell


def failure(status: int, said: str) -> str:
    """Return why a run failed, from its status (negative: a signal) and stderr; empty where it did not."""
    if status == 0:
        return ""
    if status < 0:
        killed = " (most likely out of memory)" if status == -9 else ""  # the kernel's SIGKILL
        return f"ended by signal {-status}{killed}"
    lines = [line for line in said.splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    return last.removeprefix("aespa-pl: ").partition("; continue with:")[0]


def _wait(process: "subprocess.Popen[bytes]", interruption: Interruption) -> int:
    """Return the status of a process; a signal is passed on, and a second one doesn't wait."""
    passed_on = False
    try:
        while True:
            try:
                return process.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                if interruption.received is not None and not passed_on:
                    process.send_signal(interruption.received)
                    passed_on = True
    except RunInterrupted as second:
        # the process may not have the first one yet, and would go on alone
        process.send_signal(second.number)
        raise


def _words(given: Arguments, folder: Path, cell: Cell) -> list[str]:
    """Return the options of fit for one cell; a run that was begun is continued."""
    return given.then(
        Option("quantization.method", cell.method),
        Option("quantization.bits", str(cell.bits)),
        Option("data.calibration.seed", str(cell.seed)),
        Option("output.folder", str(folder)),
        Option("output.name", cell.name),
        Option("ckpt_path", "last"),
    ).words


def _finished(folder: Path, cell: Cell) -> Cell:
    """Return the cell with the metrics of its run, if that is finished."""
    try:
        last = last_run(folder, cell.name)
        return replace(cell, metrics=None if last is None else Run.open(last).metrics())
    except UserError:  # fit says what is wrong with the run, and the other cells go on
        return cell


def _refuse_other(folder: Path, given: Arguments) -> None:
    """Note what the cells of a folder share. Raises UserError where others of its cells don't share it."""
    file = folder / "compare.json"
    options = [
        (o.key, read_configuration(Path(o.value)) if o.key == "config" and o.value else o.value)
        for o in given.options
        if not o.key.startswith("output.")
    ]
    # as it comes back from the file: keys of a YAML mapping may be numbers
    shared = json.loads(json.dumps({VERSION: aespa_pl.__version__, "options": options}))
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    before = _shared_before(file) if file.is_file() else shared
    if before != shared:
        raise UserError(
            f"{folder} has a comparison with other options ({_differing(before, shared)}): give another "
            f"--output.name, or remove {file} if the difference changes no result"
        )
    write_json(file, shared)


def _shared_before(file: Path) -> dict[str, Any]:
    """Return what the cells of an earlier comparison share. Raises UserError where the file is damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        options = [(str(key), value) for key, value in content["options"]]
        return {VERSION: content[VERSION], "options": [list(option) for option in options]}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(
            f"{file} is damaged, so that nobody knows what the cells beside it share: give another "
            "--output.name, or remove it if they have these options"
        ) from error


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the names of the options that two comparisons have different values for."""
    one, other = ({(key, json.dumps(value)) for key, value in x["options"]} for x in (before, now))
    names = sorted({key for key, _ in one ^ other})
    if before[VERSION] != now[VERSION]:
        names.insert(0, VERSION)
    return ", ".join(names) or "their order"


def _write(folder: Path, cells: Sequence[Cell]) -> None:
    """Write the table so far: it can be read while the rest is under way."""
    write_text(folder / "compare.csv", cells_csv(cells))
    write_text(folder / "compare.md", summary(cells).markdown())


def _draw(folder: Path, cells: Sequence[Cell], console: Console) -> None:
    try:
        drawn = figure(cells)
    except ModuleNotFoundError as error:
        words = f"no figure: {error.name} is not installed (pip install 'aespa-pl[report]')"
        console.print(words, soft_wrap=True)
        return
    if drawn is not None:
        write_whole(folder / "compare.svg", partial(drawn.savefig, format="svg"))
