"""Say which files of a finished run were changed or removed after the run had written them."""

from collections.abc import Sequence
from pathlib import Path

from aespa_pl.errors import UserError
from aespa_pl.run.folder import how_to_continue
from aespa_pl.run.journal import Run

SHOWN = 3
"""Files that a message names at most: a model folder that was removed had one for each block."""


def refuse_damaged(run: Run) -> None:
    """Compare every file of a finished run with the checksum in its journal.

    Raises:
        UserError: A file is missing, or its checksum is another one.
    """
    damaged = run.all_damaged_files()
    if damaged:
        raise UserError(
            f"the run {run.folder} is damaged ({named(damaged, run.folder)}): mend it with "
            f"{how_to_continue(run.folder)}"
        )


def named(damaged: Sequence[Path], folder: Path) -> str:
    """Return in words which files are damaged or missing, by their paths in ``folder``."""
    names = [file.relative_to(folder).as_posix() for file in damaged[:SHOWN]]
    more = len(damaged) - len(names)
    files = ", ".join(names) + (f" and {more} more files" if more else "")
    return f"{files} {'are' if len(damaged) > 1 else 'is'} missing or changed"
