"""A page is written without files of its figures, of which it has a known list."""

from pathlib import Path

from aespa_pl.commands.report import report

EVERY_FIGURE = {"final-loss"}


def write_page(folder: Path, *runs: Path) -> Path:
    report([str(run) for run in runs], output=str(folder), figures="none")
    return folder / "report.html"
