"""Run ``aespa-pl report``: write a page about one run, or about several side by side."""

from collections.abc import Sequence
from typing import Literal

from jsonargparse import ArgumentParser

from aespa_pl.commands.keys import A_RUN, in_words
from aespa_pl.errors import UserError
from aespa_pl.extras import install_command
from aespa_pl.paths import expanded
from aespa_pl.report.stored import read_runs
from aespa_pl.run.find import find_run
from aespa_pl.run.interruption import Interruption
from aespa_pl.storage.files import disk_errors, write_text


def run(words: Sequence[str], interruption: Interruption) -> None:  # noqa: ARG001 - as all commands
    """Read the words of the command line, of which those without a key are runs."""
    parser = ArgumentParser(
        prog="aespa-pl report",
        description="Write a page about runs: how good the result is, and where it was lost.",
        exit_on_error=False,
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="Folder of a run (NAME/version_N), or folder of runs of one name, of which the last is taken; "
        "last: the run that was worked on last, of all.",
    )
    parser.add_function_arguments(report, skip={"runs"})
    with in_words(report, runs=A_RUN):
        given = parser.parse_args(list(words[1:]))
    report(given.runs, given.output, given.figures, given.runs_folder)


def report(
    runs: list[str],
    output: str | None = None,
    figures: Literal["svg", "png", "none"] = "svg",
    runs_folder: str = "lightning_logs",
) -> None:
    """Write a page about runs: how good the result is, and where it was lost.

    A run may still be going on. The page needs no network to be read.

    Args:
        runs: Folders of runs, or of runs of one name; last.
        output: Folder for report.html and the figures; null: report in the folder of the first run.
        figures: Format of the files with one figure each, beside the page; none: only the page.
        runs_folder: Folder of all runs (their output.folder), where last looks for them.

    Raises:
        UserError: There is no such run, its journal is damaged, or a library for figures is missing.
    """
    found = (find_run(run, expanded(runs_folder)) for run in runs)
    folders = list({folder.resolve(): folder for folder in found}.values())
    try:
        from aespa_pl.report.page import render, sections, write_figures  # noqa: PLC0415  (optional)
    except ModuleNotFoundError as error:
        raise UserError(
            f"the report needs {error.name}, which is not installed: {install_command('report')}"
        ) from error
    target = expanded(output) if output else folders[0] / "report"
    if target.is_file():
        raise UserError(f"--output: {target} is a file: name a folder")
    stored = read_runs(folders)
    drawn = sections(stored)
    with disk_errors(target, "choose another folder with --output"):
        target.mkdir(parents=True, exist_ok=True)
    page = target / "report.html"
    write_text(page, render(stored, drawn))
    if figures != "none":
        with disk_errors(target):
            write_figures(drawn, target / "figures", figures)
    print(page)  # noqa: T201  (what the command answers)
