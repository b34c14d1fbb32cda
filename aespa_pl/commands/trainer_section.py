"""Put mistakes in the user's ``trainer`` section, which Lightning checks, into words."""

import inspect
import re
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar

from aespa_pl.commands.arguments import FREE, Arguments, Option, read_configuration
from aespa_pl.commands.mistakes import nearest
from aespa_pl.errors import UserError

OWN_KEYS = (
    "max_steps", "min_steps", "max_epochs", "min_epochs", "max_time",
    "limit_train_batches", "overfit_batches", "accumulate_grad_batches", "barebones",
)  # fmt: skip
"""Keys of the Trainer that would change the number of iterations, which the walk decides."""
DECIDED = (
    "is decided by the walk: set quantization.tuning.blocks.epochs and quantization.tuning.model.epochs, or "
    "quantization.rounding.iterations where the method learns the rounding"
)
"""Words about each of these keys."""
CHANGE_STEPS = (
    "GradientAccumulationScheduler", "StochasticWeightAveraging", "LearningRateFinder", "BatchSizeFinder",
)  # fmt: skip
"""Lightning's callbacks that change the steps, the rates or the batches of a training."""
PRECISIONS = (None, 32, "32", "32-true")
"""Values of trainer.precision that mean what Lightning means by them here."""
TRAINER_DEFAULTS = {
    "accelerator": "auto",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": True,
    "log_every_n_steps": 20,
}
"""Defaults that differ from Lightning's."""
TRAINER_KEYS = tuple(inspect.signature(Trainer).parameters)
"""Keys that Lightning's Trainer takes."""
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
    """Return the keys of the section that are given, each without the section's name."""
    names: list[str] = []
    for each in arguments.given():
        section, _, name = each.key.partition(".")
        if section == FREE:
            names += [name.partition(".")[0]] if name else _names_in(each)
    return names


def _names_in(whole: Option) -> list[str]:
    """Return the keys in a section that is given whole: in JSON, or in a file beside the configuration."""
    content = _value(whole.value)
    if isinstance(content, str):
        path = Path(whole.file).parent / Path(content).expanduser()
        content = read_configuration(path) if path.is_file() else None  # else the parser refuses it
    return [*content] if isinstance(content, Mapping) else []


def check_trainer(trainer: Namespace) -> None:
    """Raise UserError where the trainer section asks for something that a walk can't do."""
    for callback in listed(trainer["callbacks"]):
        if isinstance(callback, ProgressBar):
            raise UserError(
                f"trainer.callbacks has {type(callback).__name__}: remove it, because fit shows bars of its "
                "own"
            )
        if type(callback).__name__ in CHANGE_STEPS:
            raise UserError(
                f"trainer.callbacks has {type(callback).__name__}: remove it, because steps, learning "
                "rates and batches are decided by quantization.rounding and quantization.tuning"
            )
    if trainer["log_every_n_steps"] in (None, 0):
        raise UserError(
            f"trainer.log_every_n_steps is {trainer['log_every_n_steps']}: expected 1 or more steps"
        )
    if trainer["precision"] not in PRECISIONS:
        raise UserError(
            f"trainer.precision is {trainer['precision']}, but rounding variables are learned in "
            "32-true: set quantization.products for the matrix products, and model.dtype for the "
            "model's own passes"
        )
    if trainer["gradient_clip_val"] is not None:
        # each portion and each device would be clipped by a norm of its own
        raise UserError(
            f"trainer.gradient_clip_val is {trainer['gradient_clip_val']}: remove it, because the result "
            "would depend on the memory and the devices that learning is divided by"
        )


def listed(one_or_more: Any) -> list[Any]:
    """Return what Lightning takes alone or in a list as a list."""
    if one_or_more is None:
        return []
    return one_or_more if isinstance(one_or_more, list) else [one_or_more]


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
    keys = (key, f"{key}.class_path")
    given = [_value(each.value) for each in arguments.given() if each.key in keys]
    flat = [item for value in given for item in (value if isinstance(value, list) else [value])]
    paths = [item.get("class_path") if isinstance(item, Mapping) else item for item in flat]
    return [path for path in paths if isinstance(path, str)]


def _value(given: Any) -> Any:
    """Return what a text stands for: a list, a mapping, or the text itself; and anything else unchanged."""
    try:
        return yaml.safe_load(given) if isinstance(given, str) else given
    except yaml.YAMLError:
        return given


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
