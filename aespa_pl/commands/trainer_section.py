"""Put mistakes in the user's ``trainer`` section, which Lightning checks, into words."""

import inspect
import re
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError
from lightning.pytorch import Trainer

from aespa_pl.commands.arguments import FREE, Arguments, read_configuration
from aespa_pl.commands.mistakes import nearest
from aespa_pl.commands.trainers import DECIDED, OWN_KEYS
from aespa_pl.errors import UserError

TRAINER_DEFAULTS = {
    "accelerator": "auto",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": True,
    "log_every_n_steps": 20,
}
"""Defaults that differ from Lightning's."""
TRAINER_KEYS = {key: p.default for key, p in inspect.signature(Trainer).parameters.items()}
"""Lightning's own defaults, by key of the ``trainer`` section."""
EXAMPLES = {
    "callbacks": "lightning.pytorch.callbacks.LearningRateMonitor",
    "logger": "lightning.pytorch.loggers.CSVLogger",
}
"""Keys of the section that take the names of classes, each with a class of Lightning."""
SHOWN = 200
"""Largest number of characters that are shown of a library's message."""


def refuse_trainer_keys(arguments: Arguments) -> None:
    """Raise UserError with every key of the trainer section that Lightning or the walk doesn't take."""
    mistakes = []
    for name in _names_given(arguments):
        if name in OWN_KEYS:
            mistakes.append(f"{FREE}.{name} {DECIDED}")
        elif name not in TRAINER_KEYS:
            offered = [f"{FREE}.{known}" for known in TRAINER_KEYS if known not in OWN_KEYS]
            hint = nearest(f"{FREE}.{name}", offered) or ": aespa-pl fit --help lists all keys"
            mistakes.append(f"{FREE}.{name} is unknown{hint}")
    if mistakes:
        raise UserError("; ".join(dict.fromkeys(mistakes)))


def _names_given(arguments: Arguments) -> list[str]:
    """Return the keys of the section that are given, each without the section's name and without ``+``."""
    keys: list[str] = []
    for option in arguments.options:
        if option.key == "config" and option.value:
            path = Path(option.value)
            for key, value in read_configuration(path).items():
                keys += _whole_keys(str(key), value, path.parent)
        else:
            keys += _whole_keys(option.key, option.value, Path())
    sections = (key.split(".") for key in keys)
    return [rest[0].removesuffix("+") for section, *rest in sections if section == FREE and rest]


def _whole_keys(key: str, value: Any, folder: Path) -> list[str]:
    """Return a key, or in the place of the section as a whole the keys in it.

    The section is a mapping, one in JSON, or a file, whose path begins at ``folder``. Raises UserError where
    that can't be read.
    """
    if key != FREE:
        return [key]
    content = _value(value) if isinstance(value, str) else value
    if isinstance(content, str):
        path = folder / Path(content).expanduser()
        content = read_configuration(path) if path.is_file() else None  # else the parser refuses it
    return [f"{FREE}.{inner}" for inner in content] if isinstance(content, Mapping) else []


def value_refused(error: ArgumentError, arguments: Arguments, command: str) -> str:
    """Return the message for a value that jsonargparse refuses; our own sections were checked before."""
    key = re.search(r'key "([^"]*)"', str(error))
    mistakes = [m for name in EXAMPLES if (m := _unknown_classes(name, arguments))]
    if mistakes:
        return "; ".join(mistakes)
    # of the reasons of all types that a key may have, the one of the class that was named
    named = re.search(r"Problem with given class_path '([^']*)':\s*(.*)", str(error))
    cause = f"{named[1].rpartition('.')[2]}: {named[2]}" if named else first_cause(error)
    return (
        f"{key[1] if key else FREE} can't have this value ({cause}): aespa-pl {command} --help shows what "
        "it can be"
    )


def _unknown_classes(name: str, arguments: Arguments) -> str | None:
    """Return which callbacks or loggers can't be found, and what to give; None if all are there."""
    key, (package, _, example) = f"{FREE}.{name}", EXAMPLES[name].rpartition(".")
    unknown = [path for path in _class_paths(key, arguments) if not _exists(path, package)]
    if not unknown:
        return None
    module = import_module(package)
    classes = [known for known in dir(module) if inspect.isclass(getattr(module, known))]
    # most names end alike, so only a slip of a letter or two is a likeness
    likely = get_close_matches(unknown[0], classes, n=1, cutoff=0.9)
    hint = f": did you mean {likely[0]}?" if likely else ":"
    return (
        f"{key}: there is no {', '.join(unknown)}{hint} give the name of a class in {package}, such as "
        f"{example}, or the import path of yours, such as my_module.MyClass, with the folder of "
        "my_module.py in the environment variable PYTHONPATH"
    )


def _class_paths(key: str, arguments: Arguments) -> list[str]:
    """Return the names and import paths of classes that are given for a key."""
    given: list[Any] = []
    for option in arguments.options:
        if option.key.removesuffix("+") in (key, f"{key}.class_path"):
            given.append(_value(option.value or ""))
        elif option.key == "config" and option.value:
            section = read_configuration(Path(option.value)).get(FREE)
            given.append(section.get(key.split(".")[1]) if isinstance(section, Mapping) else None)
    flat = [item for value in given for item in (value if isinstance(value, list) else [value])]
    paths = [item.get("class_path") if isinstance(item, Mapping) else item for item in flat]
    return [path for path in paths if isinstance(path, str)]


def _value(text: str) -> Any:
    """Return what a word of the command line stands for: a list, a mapping, or the word itself."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _exists(path: str, package: str) -> bool:
    """Tell whether there is something at an import path, or of a name in a package."""
    own_package, _, name = path.rpartition(".")
    try:
        return hasattr(import_module(own_package or package), name)
    except ImportError:
        return False


def first_cause(error: BaseException) -> str:
    """Return the message of the error that all others were raised because of, in one line."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    text = " ".join(str(error).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
