"""Take the run that ``--ckpt_path`` names, and the configuration that it brings with it."""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from aespa_pl.commands.arguments import FREE, KEYS, REQUIRED, Arguments, Option, leaves, read_configuration
from aespa_pl.errors import UserError
from aespa_pl.run.find import LAST, find_run, last_run
from aespa_pl.settings import OutputSettings

CKPT_PATH = "ckpt_path"
TRUST = "trust_run"
CONFIGURATION = "config.yaml"
WORDS = ("accelerator", "precision", "strategy", "profiler", "devices", "gradient_clip_algorithm")
"""Keys of the ``trainer`` section whose texts name something of Lightning's."""


def with_run(arguments: Arguments, command: str) -> Arguments:
    """Return the arguments with the folder of the run as ``ckpt_path``, and with its configuration.

    ``last`` stays where there is no run yet. The configuration is taken where the command line names neither
    one nor a model; test alone takes the last run without being asked. Raises UserError where ``ckpt_path``
    names no run, or the configuration names code or places that the user has not confirmed.
    """
    trusts = any(o.key == TRUST and o.value in (None, "true") for o in arguments.options)
    arguments = arguments.without(TRUST)
    default, which = OutputSettings(), arguments.setting(CKPT_PATH, "null")
    has_settings = arguments.last("config") or arguments.setting(REQUIRED, "")
    runs = Path(arguments.setting("output.folder", default.folder)).expanduser()
    name = arguments.setting("output.name", default.name if has_settings else "")
    if which == "null" and command == "test":
        which = LAST
    is_new = which == LAST and last_run(runs, name) is None and (command != "test" or has_settings)
    if which == "null" or is_new:
        return arguments
    folder = find_run(which, runs, name)
    named = arguments.then(Option(CKPT_PATH, str(folder)))
    configuration = folder / CONFIGURATION
    if has_settings or not configuration.is_file():
        return named
    if not (trusts or is_own(folder)):
        _refuse_code_and_places(configuration)
    own = (
        Option("config", str(configuration)),
        # where it lies now, which may not be where it was begun
        Option("output.folder", str(folder.parent.parent)),
        Option("output.name", folder.parent.name),
    )
    return replace(named, options=(*own, *named.options))  # of which the later ones win


def is_own(run: Path) -> bool:
    """Return whether the configuration of a run is one that this user has run."""
    return _mark(run / CONFIGURATION).exists()


def note_own(run: Path) -> None:
    """Remember that this user has run the configuration of a run, so that it needs no confirmation."""
    with suppress(OSError):  # without a place for it, the user is asked
        mark = _mark(run / CONFIGURATION)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _mark(configuration: Path) -> Path:
    from aespa_pl.storage.cache import cache_folder  # noqa: PLC0415 - torch takes seconds

    try:
        name = hashlib.sha256(configuration.read_bytes()).hexdigest()
    except OSError:
        name = "none"
    return cache_folder() / "own_configurations" / name


def _refuse_code_and_places(configuration: Path) -> None:
    """Raise UserError where the configuration of somebody else's run names code, or places to write to."""
    content = read_configuration(configuration)
    keys = sorted({key for key, value in leaves(content) if not _is_data(key, value)})
    if keys:
        raise UserError(
            f"{configuration} names code to run or places to write to ({', '.join(keys)}), and "
            f"you have not run this configuration here: read it, and add --{TRUST} true if you trust it, or "
            "give your own with --config"
        )


def _is_data(key: str, value: Any) -> bool:
    """Return whether a value neither runs anything nor says where something is written."""
    section, _, name = key.partition(".")
    if section != FREE:
        return key in KEYS and (key != "data.cache" or value is None)
    if isinstance(value, str):
        return name in WORDS and value.replace("-", "").replace("_", "").isalnum()
    return not isinstance(value, Mapping | list) or (
        name == "devices" and all(isinstance(item, int) for item in value)
    )
