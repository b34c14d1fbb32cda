"""Find the run that ``--ckpt_path`` names, and the configuration that it brings with it."""

from pathlib import Path

from aespa_pl.commands.arguments import REQUIRED, Arguments, Option
from aespa_pl.errors import UserError
from aespa_pl.settings import OutputSettings

LAST = "last"
"""``--ckpt_path last``: the run that was worked on last."""
UNNAMED = (None, "null")
"""Values of ``--ckpt_path`` that name no run."""
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
    if arguments.wants_help or (which in UNNAMED and command != "test"):
        return arguments
    is_last = which in (*UNNAMED, LAST)
    folder = _last(arguments) if is_last else run_folder(str(which))
    if arguments.last("config") or arguments.last(REQUIRED):
        # last is then of the name in that configuration, which is read later
        return arguments if is_last else arguments.then(Option(CKPT_PATH, str(folder)))
    if folder is None and command == "test":
        raise UserError(
            "no run to measure: give the folder of a run (NAME/version_N) with --ckpt_path, or begin with "
            "aespa-pl fit"
        )
    if folder is None:
        return arguments
    # by its folder: last may be another run by the time that the command asks
    arguments = arguments.then(Option(CKPT_PATH, str(folder)))
    if not (folder / "config.yaml").is_file():
        return arguments
    return arguments.after(
        Option("config", str(folder / "config.yaml")),
        # where it lies now, which may not be where it was begun
        Option("output.folder", str(folder.parent.parent)),
        Option("output.name", folder.parent.name),
    )


def _last(arguments: Arguments) -> Path | None:
    """Return the last run where the command line looks for one: of its name, or without one of any."""
    from aespa_pl.run.versions import last_run, last_run_of_any_name  # noqa: PLC0415  (imports torch for its neighbours)

    folder = Path(arguments.last("output.folder") or OutputSettings().folder).expanduser()
    name = arguments.last("output.name")
    return last_run(folder / name) if name else last_run_of_any_name(folder)
