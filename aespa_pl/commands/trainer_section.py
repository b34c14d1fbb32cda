"""Put mistakes in the user's ``trainer`` section, which Lightning checks, into words."""

import inspect
import re
from typing import Any

from jsonargparse import ArgumentError, Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar

from aespa_pl.commands.arguments import FREE, Arguments
from aespa_pl.commands.mistakes import nearest
from aespa_pl.errors import UserError

WALK_KEYS = (
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
CLASSES = {
    f"{FREE}.callbacks": "the name of a class in lightning.pytorch.callbacks, such as LearningRateMonitor",
    f"{FREE}.logger": "the name of a class in lightning.pytorch.loggers, such as CSVLogger",
}
"""Keys that take classes, and what to give to them."""
SHOWN = 200
"""Largest number of characters that are shown of a library's message."""


def refuse_trainer_keys(arguments: Arguments) -> None:
    """Raise UserError with every key of the trainer section that Lightning or the walk doesn't take."""
    keys = (each.key.removesuffix("+").split(".") for each in arguments.given())
    mistakes = []
    for name in dict.fromkeys(key[1] for key in keys if key[0] == FREE and len(key) > 1):
        if name in WALK_KEYS:
            mistakes.append(f"{FREE}.{name} {DECIDED}")
        elif name not in TRAINER_KEYS:
            offered = [f"{FREE}.{known}" for known in TRAINER_KEYS if known not in WALK_KEYS]
            mistakes.append(f"{FREE}.{name} is unknown{nearest(f'{FREE}.{name}', offered)}")
    if mistakes:
        raise UserError("; ".join(mistakes))


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


def value_refused(error: ArgumentError, command: str) -> str:
    """Return the message for a value that jsonargparse refuses; our own sections were checked before."""
    key = re.search(r'key "([^"]*)"', str(error))
    # of the reasons of all types that a key may have, the one of the class that was named
    named = re.search(r"Problem with given class_path '(?:[^']*\.)?(\w+)':\s*(.*)", str(error))
    given = re.search(r"Given value: (.*)", str(error))
    cause = f"{named[1]}: {named[2]}" if named else given[1] if given else first_cause(error)
    advice = f"aespa-pl {command} --help {FREE} shows what it can be"
    if key and key[1] in CLASSES:
        advice = (
            f"give {CLASSES[key[1]]}, or the import path of a class of yours, such as my_module.MyClass, "
        )
        advice += "with the folder of my_module.py in the environment variable PYTHONPATH"
    return f"{key[1] if key else FREE} can't have this value ({cause}): {advice}"


def first_cause(error: BaseException) -> str:
    """Return the message of the error that all others were raised because of, in one line."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    text = " ".join(str(error).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
