"""Number the folders of runs: NAME/version_0, version_1 ..."""

from collections.abc import Iterable
from pathlib import Path

from aespa_pl.storage.files import MEND, disk_errors

ANOTHER_FOLDER = f"{MEND}, or choose another folder with --output.folder"
"""Advice to a user whose run has not begun."""


def next_version(folder: Path) -> Path:
    """Make and return ``folder/version_N`` for the smallest N above all that exist.

    Raises:
        UserError: The folder cannot be written to.
    """
    with disk_errors(folder, ANOTHER_FOLDER):
        folder.mkdir(parents=True, exist_ok=True)
        taken = [version_number(path) for path in folder.glob("version_*")]
        while True:
            path = folder / f"version_{max(taken, default=-1) + 1}"
            try:
                path.mkdir()
            except FileExistsError:  # another process was faster
                taken.append(version_number(path))
                continue
            return path


def version_number(path: Path) -> int:
    """Return N of a folder named version_N, -1 for any other name."""
    number = path.name.removeprefix("version_")
    return int(number) if number.isdecimal() else -1


def last_run(parent: Path) -> Path | None:
    """Return the run in ``parent`` that was worked on last, None if there is none.

    It is the one whose journal was written last, so a run that was continued comes after runs that
    were begun later; of journals with the same time, the one of the highest version.
    """
    return _last(parent.glob("version_*/journal.json"))


def last_run_of_any_name(runs_folder: Path) -> Path | None:
    """Return the run of any name in a folder of runs that was worked on last, None if there is none."""
    return _last(runs_folder.glob("*/version_*/journal.json"))


def _last(journals: Iterable[Path]) -> Path | None:
    last = max(journals, key=_age, default=None)
    return None if last is None else last.parent


def _age(journal: Path) -> tuple[float, int]:
    return journal.stat().st_mtime, version_number(journal.parent)
