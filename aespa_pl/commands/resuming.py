"""Find the run that ``--ckpt_path`` names, and the configuration that it brings with it."""

from pathlib import Path

from aespa_pl.commands.arguments import REQUIRED, Arguments, Option
from aespa_pl.errors import UserError
from aespa_pl.settings import OutputSettings

LAST = "last"
"""``--ckpt_path last``: the newest run."""
CKPT_PATH = "ckpt_path"
JOURNAL = "journal.json"


def run_folder(path: str) -> Path:
    """Return the folder of the run that a path names: the folder, or any file inside it.

    Raises:
        UserError: Neither the path nor a folder above it is the folder of a run.
    """
    given = Path(path).expanduser()
    for folder in (given, *given.parents):
        if (folder / JOURNAL).is_file():
            return folder
    raise UserError(
        f"ckpt_path: {given} is not the folder of a run, nor a file inside one: give the folder of a run "
        "(NAME/version_N), or last"
    )


def with_run(arguments: Arguments, command: str) -> Arguments:
    """Return the arguments with the folder of the run as ``ckpt_path``, and with its configuration.

    The run's configuration is taken where the command line names neither a configuration nor a model.

    Args:
        arguments: Arguments of the command line.
        command: ``fit``, ``test`` or ``plan``; only test takes the last run without being asked.

    Raises:
        UserError: ``ckpt_path`` is neither the folder of a run nor a file in one, or test finds no run.
    """
    which = arguments.last(CKPT_PATH)
    if arguments.wants_help or (which is None and command != "test"):
        return arguments
    if which not in (None, LAST, "null"):
        folder: Path | None = run_folder(str(which))
        arguments = arguments.then(Option(CKPT_PATH, str(folder)))
    else:
        folder = _last(arguments)
    if arguments.last("config") or arguments.last(REQUIRED):
        return arguments
    if folder is None and command == "test":
        raise UserError(
            "no run to measure: give the folder of a run (NAME/version_N) with --ckpt_path, or begin with "
            "aespa-pl fit"
        )
    if folder is None or not (folder / "config.yaml").is_file():
        return arguments
    return arguments.after(
        Option("config", str(folder / "config.yaml")),
        # where it lies now, which may not be where it was begun
        Option("output.folder", str(folder.parent.parent)),
        Option("output.name", folder.parent.name),
    )


def _last(arguments: Arguments) -> Path | None:
    """Return the newest run where the command line looks for one: of its name, or without one of any."""
    from aespa_pl.run.versions import last_run, newest_run  # noqa: PLC0415  (imports torch for its neighbours)

    folder = Path(arguments.last("output.folder") or OutputSettings().folder).expanduser()
    name = arguments.last("output.name")
    return last_run(folder / name) if name else newest_run(folder)
