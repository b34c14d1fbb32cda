"""Find the run that a user means, in every command alike; nothing large is imported here."""

import os
from pathlib import Path

from aespa_pl.errors import UserError
from aespa_pl.paths import expanded

LAST = "last"  # word for the run that was worked on last
JOURNAL = "journal.json"
SMOKE_NAME = "_smoke_test"  # end of the names of runs of trainer.fast_dev_run, which leave no model
NAMELESS = ("", "..")  # last parts of relative paths that are no name
GIVE = "give the folder of a run (NAME/version_N)"


def find_run(given: str, runs: Path, name: str | None = None) -> Path:
    """Return the folder of the run that a user means.

    It is given as ``last`` (of a name, or of all in ``runs``), as the folder of a run or any file inside it,
    or as the folder of the runs of one name, of which the last is taken. Raises UserError where there is no
    such run, or a link in it leads elsewhere.
    """
    if given == LAST:
        run = last_run(runs, name)
        missing = f"there is no run in {runs / (name or '')}: begin with aespa-pl fit, or {GIVE}"
    else:
        path = expanded(given)
        if path.name in NAMELESS or ".." in path.parts:
            path = path.resolve()
        around = [parent for parent in path.parents if parent != Path() or path.exists()]
        above = (folder for folder in (path, *around) if (folder / JOURNAL).is_file())
        run = next(above, None) or last_run(path.parent, path.name)
        missing = f"{given} is not the folder of a run, nor a file inside one: {GIVE}, or last"
    if run is None:
        raise UserError(missing)
    for folder, folders, files in os.walk(run):  # which follows no link
        for path in (Path(folder, name) for name in (*folders, *files)):
            if path.is_symlink():  # whoever made the run would choose what is overwritten
                raise UserError(
                    f"{path} is a link, which a run does not hold, because what it leads to would be read "
                    "and overwritten: put the file or folder itself in its place, or remove it"
                )
    # the commands take output.name from the folder above
    return run.resolve() if run.parent.name in NAMELESS else run


def last_run(runs: Path, name: str | None = None) -> Path | None:
    """Return the run that was worked on last, of a name or of any but smoke tests; None if there is none.

    Its journal was written last, even if others were begun later; at the same time, its version is highest.
    """
    pattern = f"version_*/{JOURNAL}"
    journals = (runs / name).glob(pattern) if name else runs.rglob(pattern)
    if not name:
        journals = (j for j in journals if not j.parents[1].name.endswith(SMOKE_NAME))
    last = max(journals, key=lambda j: (j.stat().st_mtime, version_number(j.parent)), default=None)
    return None if last is None else last.parent


def refuse_smoke_test(run: Path) -> None:
    """Raise UserError for a smoke test, which nothing can be measured of or made from."""
    if run.parent.name.endswith(SMOKE_NAME) and not (run / "metrics.json").is_file():
        raise UserError(
            f"{run} is a smoke test (trainer.fast_dev_run), which has no model: run fit without "
            "trainer.fast_dev_run"
        )


def version_number(path: Path) -> int:
    """Return N of a folder named version_N, -1 for any other name."""
    number = path.name.removeprefix("version_")
    return int(number) if number.isdecimal() else -1
