"""Number the folders of runs: NAME/version_0, version_1 ..."""

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
    """Return the newest run in ``parent``, None if there is none."""
    runs = [path for path in parent.glob("version_*") if (path / "journal.json").is_file()]
    return max(runs, key=version_number, default=None)


def newest_run(runs_folder: Path) -> Path | None:
    """Return the newest run of any name in a folder of runs, None if there is none."""
    journals = runs_folder.glob("*/version_*/journal.json")
    newest = max(journals, key=_age, default=None)
    return None if newest is None else newest.parent


def _age(journal: Path) -> tuple[float, int]:
    return journal.stat().st_mtime, version_number(journal.parent)
