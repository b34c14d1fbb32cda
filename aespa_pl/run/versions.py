"""Number the folders of runs: NAME/version_0, version_1 ..."""

from pathlib import Path

from aespa_pl.run.find import version_number
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
